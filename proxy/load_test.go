package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/router"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// simulate starts a Proxy in front of n simulated replicas.
func simulate(t *testing.T, n int, policy string, engine engine.Config) *fleet {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	var list []*backends.Backend
	for i := range n {
		s := sim.NewServer(sim.Config{Model: "m", Engine: engine})
		if err := s.Listen("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		running.Go(func() {
			if err := s.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		list = append(list, backendAt(t, fmt.Sprintf("sim%d", i), s.URL(), ""))
	}
	return newFleet(t, list, policy, router.QueueSettings{}, func(o *Options) { o.FirstByte, o.Idle = 0, 0 })
}

func (f *fleet) inFlight() (sum int) {
	for _, b := range f.backends {
		sum += int(b.InFlight.Load())
	}
	return sum
}

func TestBurstOfStreamsLosesNone(t *testing.T) {
	const streams, tokens = 2000, 8
	before := runtime.NumGoroutine()
	f := simulate(t, 4, "prefix", engine.Config{Speed: 20, MaxSeqs: streams, KVTokens: 4_000_000})
	open := make(chan struct{})
	for _, b := range f.backends {
		terms := *b.Terms()
		terms.Transport = &gate{terms.Transport.(*transport.Transport), open}
		b.SetTerms(terms)
	}
	f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = streams
	f.client.Timeout = 2 * time.Minute
	failed := make(chan error, streams)
	var all sync.WaitGroup
	for i := range streams {
		all.Go(func() {
			if err := f.playStream(i, tokens); err != nil {
				failed <- err
			}
		})
	}
	eventually(t, "all streams are in flight at once", func() bool { return f.inFlight() == streams })
	close(open)
	all.Wait()
	close(failed)
	for err := range failed {
		t.Fatalf("%v (and perhaps %d more)", err, len(failed))
	}
	f.settled()
	f.client.CloseIdleConnections()
	for _, b := range f.backends {
		b.Terms().Transport.(*gate).CloseIdleConnections()
	}
	// Those of the simulation and of the listeners remain.
	eventually(t, "the streams' goroutines are gone", func() bool { return runtime.NumGoroutine() < before+40 })
}

// gate holds requests back until it is opened.
type gate struct {
	*transport.Transport
	open <-chan struct{}
}

func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	<-g.open
	return g.Transport.RoundTrip(r)
}

// playStream asks for so many tokens and checks that all of them came, and an end.
func (f *fleet) playStream(i, tokens int) error {
	body := fmt.Sprintf(`{"model":"m","stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"Question %d"}]}`, tokens, i)
	resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, last := 0, ""
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if line := lines.Text(); line != "" {
			last = line
			if strings.Contains(line, `"delta":{"content":"`) {
				said++
			}
		}
	}
	if lines.Err() != nil || resp.StatusCode != http.StatusOK || last != "data: [DONE]" || said == 0 {
		return fmt.Errorf("stream %d: status %d, %d contents, ended with %.100q, %v", i, resp.StatusCode, said, last, lines.Err())
	}
	return nil
}

// One prompt that everybody shares, short questions and long answers: the
// replica that holds the prompt must not get all of them.
func TestHotPromptDoesNotPileUpOnOneReplica(t *testing.T) {
	const (
		replicas = 8
		speed    = 8
		rate     = 20 * speed // a second
		requests = 5 * rate
	)
	f := simulate(t, replicas, "prefix", engine.Config{Speed: speed, KVTokens: 1_536_000})
	f.client.Timeout = 2 * time.Minute
	f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = 512
	draw := rand.New(rand.NewPCG(7, 7))
	system := strings.Repeat("You answer. ", 2048*4/12)
	failed := make(chan error, requests)
	var all sync.WaitGroup
	start := time.Now()
	span := time.Duration(float64(requests) / rate * float64(time.Second))
	sums := f.sampleInFlight(start.Add(span/10), start.Add(span*9/10))
	due := start
	for i := range requests {
		question := fmt.Sprintf("%d: %s", i, strings.Repeat("why? ", 40*4/5))
		tokens := max(1, int(300*math.Exp(0.5*draw.NormFloat64())))
		due = due.Add(time.Duration(draw.ExpFloat64() / rate * float64(time.Second)))
		time.Sleep(time.Until(due))
		all.Go(func() {
			if err := f.askHot(system, question, tokens); err != nil {
				failed <- err
			}
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		t.Fatal(err)
	}
	total, counts := 0, <-sums
	for _, s := range counts {
		total += s
	}
	for b, s := range counts {
		if share := float64(s) * replicas / float64(total); share > 1.3 {
			t.Errorf("replica %d has %.2f × the fleet's mean in flight: %v", b, share, counts)
		}
	}
}

// sampleInFlight sums up, for each backend, what is in flight every few
// milliseconds between two times.
func (f *fleet) sampleInFlight(from, to time.Time) <-chan []int {
	out := make(chan []int, 1)
	go func() {
		sums := make([]int, len(f.backends))
		time.Sleep(time.Until(from))
		for time.Now().Before(to) {
			for i, b := range f.backends {
				sums[i] += int(b.InFlight.Load())
			}
			time.Sleep(5 * time.Millisecond)
		}
		out <- sums
	}()
	return out
}

func (f *fleet) askHot(system, question string, tokens int) error {
	body := fmt.Sprintf(`{"model":"m","ignore_eos":true,"max_tokens":%d,"messages":[{"role":"system","content":"%s"},{"role":"user","content":"%s"}]}`, tokens, system, question)
	resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if answer, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d %.200s %v", resp.StatusCode, answer, err)
	}
	return nil
}
