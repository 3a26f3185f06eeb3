package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/lab/freeport"
	"warmroute/lab/policies"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/server"
)

// splitReplica is a simulated replica that transfers KV.
type splitReplica struct {
	*sim.Server
	config sim.Config
	kill   func()
}

func startSplitReplica(t *testing.T, c sim.Config, address string) *splitReplica {
	t.Helper()
	r := &splitReplica{Server: sim.NewServer(c), config: c}
	if err := r.Bind(address); err != nil {
		t.Fatal(err)
	}
	r.kill = runUntilStopped(t, r.Run)
	return r
}

// isBusy reports whether the replica works on a request.
func (r *splitReplica) isBusy() bool {
	s := r.Stats()
	return s.Running+s.Waiting+s.Arriving > 0
}

// simSplitFleet is a proxy in front of two replicas for prefill and two for decode, which splits whatever it can.
type simSplitFleet struct {
	t               *testing.T
	url, admin      string
	prefill, decode []*splitReplica
	reference       *splitReplica // that serves whole requests, without the proxy
}

// splitLease is that of the replicas and of the proxy.
const splitLease = 2 * time.Second

func startSimSplitFleet(t *testing.T, speed float64, recompute bool) *simSplitFleet {
	t.Helper()
	c := sim.Config{Engine: engine.Config{Speed: speed, Lease: splitLease}, Connector: sim.ConnectorConfig{Enabled: true,
		Recompute: recompute}}
	f := &simSplitFleet{t: t, reference: startSplitReplica(t, sim.Config{Engine: engine.Config{Speed: 50}}, "127.0.0.1:0")}
	var yaml strings.Builder
	fmt.Fprintf(&yaml, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nhealth: {down_interval: 50ms}\n"+
		"disaggregation: {min_uncached_tokens: 1, kv_lease: %v}\nbackends:\n", splitLease)
	for i := range 4 {
		r, role := startSplitReplica(t, c, freeport.FindAddress(t)), "prefill"
		if f.prefill = append(f.prefill, r); i >= 2 {
			f.prefill, f.decode, role = f.prefill[:2], append(f.decode, r), "decode"
		}
		fmt.Fprintf(&yaml, "- {name: %s%d, url: %q, role: %s}\n", role, i%2, r.URL(), role)
	}
	s, err := server.New(server.Options{Config: loadConfig(t, yaml.String()), Policies: policies.All(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	runUntilStopped(t, s.Run)
	f.url, f.admin = "http://"+s.Addr().String(), "http://"+s.AdminAddr().String()
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	f.await("a request is split", func() bool {
		f.ask(words(50), 2, false)
		return f.count("split") > 0
	})
	return f
}

func (f *simSplitFleet) await(what string, is func() bool) {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// count returns how many requests had that result.
func (f *simSplitFleet) count(result string) int {
	return int(metricSum(f.t, f.admin, "warmroute_split_requests_total", result))
}

// splitResponse is what a client got.
type splitResponse struct {
	text     string
	complete bool   // it has its end
	problem  string // an error event, an error status or a failed connection
}

// chatText asks a server for a chat and returns its response. first is called with the first token of a stream.
func chatText(url, prompt string, tokens int, stream bool, first func()) (r splitResponse) {
	body := fmt.Sprintf(`{"model":"sim","stream":%v,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, stream,
		tokens, prompt)
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return splitResponse{problem: err.Error()}
	}
	defer resp.Body.Close()
	if !stream || resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			return splitResponse{problem: fmt.Sprint(resp.StatusCode, " ", string(text), err)}
		}
		return splitResponse{text: gjson.GetBytes(text, "choices.0.message.content").Str, complete: true}
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, isData := strings.CutPrefix(lines.Text(), "data: ")
		switch text := gjson.Get(data, "choices.0.delta.content").Str; {
		case !isData:
		case data == "[DONE]":
			r.complete = r.problem == ""
		case strings.Contains(data, `"error"`):
			r.problem = data
		case text != "":
			if r.text == "" && first != nil {
				first()
			}
			r.text += text
		}
	}
	return r
}

// ask sends a chat, which must get the response that one replica gives, and reports whether it did.
func (f *simSplitFleet) ask(prompt string, tokens int, stream bool) {
	f.t.Helper()
	if got, want := chatText(f.url, prompt, tokens, stream, nil), chatText(f.reference.URL(), prompt, tokens, false, nil); !got.complete ||
		got.text != want.text {
		f.t.Errorf("stream %v: got %+v, want %q", stream, got, want.text)
	}
}

// awaitNothingPinned waits until no block is kept for another replica.
func (f *simSplitFleet) awaitNothingPinned() {
	f.t.Helper()
	for _, r := range append(f.prefill, f.decode...) {
		f.await("no block is pinned", func() bool { return r.Stats().Pinned == 0 && !r.isBusy() })
	}
}

func TestSplitChats(t *testing.T) {
	t.Parallel()
	f := startSimSplitFleet(t, 20, false)
	computed := func() (tokens int64) {
		for _, d := range f.decode {
			s := d.Stats()
			tokens += s.PromptTokens - s.CachedPromptTokens
		}
		return tokens
	}
	before, split := computed(), f.count("split")
	for _, stream := range []bool{false, true} {
		prompt := words(300)
		for range 5 {
			f.ask(prompt, 20, stream)
			prompt += words(40)
		}
	}
	if n := f.count("split") - split; n != 10 {
		t.Errorf("%d of 10 requests were split", n)
	}
	if n := computed() - before; n != 0 {
		t.Errorf("the replicas for decode have computed %d tokens", n)
	}
	f.awaitNothingPinned()
}

// A fault of any replica costs the client no more than time, until it has the first token.
func TestSplitFaults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prefill, decode sim.Fault
		recompute       bool
		result          string
	}{
		"prefill overloaded":                 {prefill: sim.Fault{Kind: sim.Status, Status: 503, Requests: 1}, result: "prefill_failed"},
		"prefill fails":                      {prefill: sim.Fault{Kind: sim.Status, Status: 500, Requests: 1}, result: "prefill_failed"},
		"prefill too many requests":          {prefill: sim.Fault{Kind: sim.Status, Status: 429, Requests: 1}, result: "prefill_failed"},
		"prefill reset":                      {prefill: sim.Fault{Kind: sim.Reset, Requests: 1}, result: "prefill_failed"},
		"prefill reset late":                 {prefill: sim.Fault{Kind: sim.ResetLate, Requests: 1}, result: "prefill_failed"},
		"prefill reset at work":              {prefill: sim.Fault{Kind: sim.ResetAtWork, Delay: .05, Requests: 1}, result: "prefill_failed"},
		"prefill aborted":                    {prefill: sim.Fault{Kind: sim.AbortEach, Requests: 1}, result: "prefill_failed"},
		"decode overloaded":                  {decode: sim.Fault{Kind: sim.Status, Status: 503, Requests: 1}, result: "decode_failed"},
		"decode fails":                       {decode: sim.Fault{Kind: sim.Status, Status: 500, Requests: 1}, result: "decode_failed"},
		"decode reset":                       {decode: sim.Fault{Kind: sim.Reset, Requests: 1}, result: "decode_failed"},
		"decode reset late":                  {decode: sim.Fault{Kind: sim.ResetLate, Requests: 1}, result: "decode_failed"},
		"decode dies before the first token": {decode: sim.Fault{Kind: sim.Die, Requests: 1}, result: "decode_failed"},
		"transfer fails":                     {decode: sim.Fault{Kind: sim.TransferFail, Requests: 1}, result: "decode_failed"},
		"transfer fails, recompute":          {decode: sim.Fault{Kind: sim.TransferFail, Requests: 1}, recompute: true, result: "split"},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", stream ", stream), func(t *testing.T) {
				t.Parallel()
				f := startSimSplitFleet(t, 20, c.recompute)
				before := f.count(c.result)
				for i := range 2 {
					for r, fault := range map[*splitReplica]sim.Fault{f.prefill[i]: c.prefill, f.decode[i]: c.decode} {
						if fault.Kind == "" {
							continue
						}
						if err := r.SetFault(fault); err != nil {
							t.Fatal(err)
						}
					}
				}
				f.ask(words(300), 20, stream)
				f.await("the request is counted as "+c.result, func() bool { return f.count(c.result) == before+1 })
				f.awaitNothingPinned()
			})
		}
	}
}

// Each replica of a request is killed in each of its phases.
func TestSplitKilledReplicas(t *testing.T) {
	t.Parallel()
	kill := func(f *simSplitFleet, list []*splitReplica, isDue func(*splitReplica) bool) {
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			for _, r := range list {
				if isDue(r) {
					r.kill()
					return
				}
			}
		}
		f.t.Error("no replica was killed")
	}
	for name, c := range map[string]struct {
		prefill bool
		isDue   func(*splitReplica) bool
		result  string // "": either way
	}{
		"prefill, while it computes":         {true, (*splitReplica).isBusy, "prefill_failed"},
		"prefill, when it has computed":      {true, func(r *splitReplica) bool { return r.Stats().Pinned > 0 }, ""},
		"decode, before the first token":     {false, (*splitReplica).isBusy, "decode_failed"},
		"decode, before it gets its request": {false, func(r *splitReplica) bool { return true }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := startSimSplitFleet(t, 1, false)
			for _, d := range f.decode {
				if err := d.SetFault(sim.Fault{Kind: sim.Hold, Delay: .3}); err != nil {
					t.Fatal(err)
				}
			}
			before := f.count(c.result)
			list := f.decode
			if c.prefill {
				list = f.prefill
			}
			var killing sync.WaitGroup
			killing.Go(func() { kill(f, list, c.isDue) })
			f.ask(words(4000), 20, true)
			killing.Wait()
			if c.result != "" {
				f.await("the request is counted as "+c.result, func() bool { return f.count(c.result) == before+1 })
			}
		})
	}
	t.Run("decode, after the first token", func(t *testing.T) {
		t.Parallel()
		f := startSimSplitFleet(t, 1, false)
		prompt := words(300)
		got := chatText(f.url, prompt, 200, true, func() { kill(f, f.decode, (*splitReplica).isBusy) })
		want := chatText(f.reference.URL(), prompt, 200, false, nil)
		if got.complete || got.problem == "" || got.text == "" || !strings.HasPrefix(want.text, got.text) {
			t.Errorf("got %+v", got)
		}
	})
}

// Replicas are killed and restarted in turn under load: no response is lost before its first token, and none is wrong.
func TestSplitRollingKills(t *testing.T) {
	t.Parallel()
	f := startSimSplitFleet(t, 10, false)
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	var clients sync.WaitGroup
	var served, truncated atomic.Int64
	for range 8 {
		clients.Go(func() {
			for ctx.Err() == nil {
				prompt, tokens, stream := words(100+rand.IntN(500)), 1+rand.IntN(40), rand.IntN(2) == 0
				got, want := chatText(f.url, prompt, tokens, stream, nil), chatText(f.reference.URL(), prompt, tokens, false, nil)
				switch {
				case got.complete && got.text == want.text:
					served.Add(1)
				case stream && got.problem != "" && got.text != "" && strings.HasPrefix(want.text, got.text):
					truncated.Add(1)
				default:
					t.Errorf("stream %v: got %+v, want %q", stream, got, want.text)
					return
				}
			}
		})
	}
	for i := 0; ctx.Err() == nil; i++ {
		list := [][]*splitReplica{f.prefill, f.decode}[i%2]
		at := i / 2 % 2
		list[at].kill()
		time.Sleep(300 * time.Millisecond)
		list[at] = startSplitReplica(t, list[at].config, strings.TrimPrefix(list[at].URL(), "http://"))
		time.Sleep(1500 * time.Millisecond)
	}
	clients.Wait()
	t.Logf("%d served, %d truncated, %d split, %d with a failed prefill, %d with a failed decode, %d late", served.Load(), truncated.Load(),
		f.count("split"), f.count("prefill_failed"), f.count("decode_failed"), f.count("late"))
	if f.count("split") < 20 {
		t.Error("too few requests were split")
	}
	f.awaitNothingPinned()
}
