package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	stressClients = 64
	// stressHangTimeout is the time without progress after which a request counts as hung. It is far
	// above what any of them takes, also on a busy machine.
	stressHangTimeout = time.Minute
)

// stressEnvironment gives the proxy more running threads than the machine has processors, and a
// garbage collection every few milliseconds, which suspends all of them.
var stressEnvironment = []string{"GOMAXPROCS=8", "GOMEMLIMIT=48MiB", "GOGC=20"} // never modified

// stressCommands compete with the proxy: one for processors, one for memory as well.
var stressCommands = []string{ // never modified
	"while :; do :; done",
	"while :; do head -c 200000000 /dev/zero | tail -c 200000000 >/dev/null; done",
}

// stressConnections sends o.stressRequests short requests through a proxy of its own, of clients that
// keep their connections, make a new one for each request, or disconnect early, and requires that
// each request makes progress: a wake-up of a connection that is lost leaves one waiting forever.
func (o *options) stressConnections(ctx context.Context, r *rig) (err error) {
	var replicas []*testbed.Replica
	for i := range 2 {
		var one *testbed.Replica
		if one, err = r.newReplica(fmt.Sprint("stress-r", i), "--speed", "10000", "--kv-tokens", "200000"); err != nil {
			return err
		}
		defer func() {
			if one.Running() {
				err = errors.Join(err, testbed.KillAndWait(one))
			}
		}()
		if err := r.startAndAwaitHealthy(ctx, []*testbed.Replica{one}); err != nil {
			return err
		}
		replicas = append(replicas, one)
	}
	p, err := r.newProxy("stress", "log: {level: warn}")
	if err != nil {
		return err
	}
	p.Environment = stressEnvironment
	if err := p.WriteConfig(replicas); err != nil {
		return err
	}
	if err := p.StartAndAwait(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Terminate(waitTimeout)) }()
	for _, command := range stressCommands {
		var competitor *testbed.Process
		if competitor, err = testbed.StartProcess(exec.Command("sh", "-c", command)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, competitor.KillAndWait()) }()
	}
	began := time.Now()
	s := &stress{verdict: r.verdict, url: p.URL, requests: int64(o.stressRequests), hangTimeout: stressHangTimeout}
	hung := s.runUntilHang(ctx)
	if hung { // the connections are still open
		err = saveGoroutines(p.Admin, filepath.Join(r.dir, "stress.goroutines"))
	}
	s.end()
	if err := errors.Join(ctx.Err(), err); hung || err != nil {
		return err
	}
	took := time.Since(began)
	r.verdict.addMeasurement("%d requests, %d of them disconnected, %.0f a second", s.begun.Load(), s.disconnected.Load(),
		float64(s.begun.Load())/took.Seconds())
	return nil
}

// saveGoroutines writes the stacks of all goroutines of a proxy to a file.
func saveGoroutines(admin, file string) error {
	resp, err := http.Get(admin + "/debug/pprof/goroutine?debug=2")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	return errors.Join(err, os.WriteFile(file, all, 0o600))
}

// stress is a run of stressConnections.
type stress struct {
	verdict      *verdict
	url          string
	requests     int64
	hangTimeout  time.Duration
	begun        atomic.Int64
	disconnected atomic.Int64
	clients      [stressClients]stressClient
	end          func() // ends the requests that still run and waits for them; set by runUntilHang
}

// stressClient is one of the clients, which send one request after another.
type stressClient struct {
	loadgen.Client
	streams      func(n int64) bool
	disconnects  bool
	progressedAt atomic.Int64 // in nanoseconds of the Unix time; 0: it has ended
}

// runUntilHang sends all requests, and returns when each has ended or one has hung. The caller must
// call end.
func (s *stress) runUntilHang(ctx context.Context) (hung bool) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	for i := range s.clients {
		c := &s.clients[i]
		// A request that hangs must still be open when the proxy's goroutines are saved.
		c.Client = loadgen.Client{URL: s.url, Model: "sim", HTTP: loadgen.NewHTTPClient(), Speed: 1, Timeout: 2 * s.hangTimeout}
		c.HTTP.Transport.(*http.Transport).DisableKeepAlives = i%8 == 7
		c.disconnects = i%8 == 6
		c.streams = func(n int64) bool { return i%2 == 0 || i%8 == 7 && n%2 == 0 }
		c.progressedAt.Store(time.Now().UnixNano())
		running.Go(func() {
			defer c.progressedAt.Store(0)
			defer c.HTTP.CloseIdleConnections()
			for n := s.begun.Add(1); n <= s.requests && ctx.Err() == nil; n = s.begun.Add(1) {
				s.sendAndCheck(ctx, c, n)
			}
			s.begun.Add(-1)
		})
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		running.Wait()
	}()
	s.end = func() {
		cancel()
		<-ended
	}
	watch := time.NewTicker(s.hangTimeout / 60)
	defer watch.Stop()
	for {
		select {
		case <-ended:
			return false
		case <-watch.C:
		}
		for i := range s.clients {
			at := s.clients[i].progressedAt.Load()
			if at != 0 && time.Since(time.Unix(0, at)) > s.hangTimeout {
				s.verdict.require(false, "a request of client %d made no progress in %v", i, s.hangTimeout)
				return true
			}
		}
	}
}

// sendAndCheck sends request n, and requires that the client gets the complete response to it,
// unless it disconnects.
func (s *stress) sendAndCheck(ctx context.Context, c *stressClient, n int64) {
	id := fmt.Sprint("stress-", n)
	turn := loadgen.Turn{Messages: []loadgen.Message{{Role: "user", Content: id}}, OutputTokens: 3}
	q := loadgen.Request{Stream: c.streams(n), Header: http.Header{"X-Request-Id": {id}}}
	q.Body = loadgen.ChatBody(c.Model, turn, q.Stream)
	if c.disconnects && rand.IntN(4) == 0 {
		q.Behavior.DisconnectAfter = 1 + time.Duration(rand.Int64N(int64(5*time.Millisecond)))
	}
	got := c.Send(ctx, q)
	c.progressedAt.Store(time.Now().UnixNano())
	if ctx.Err() != nil || got.Err == loadgen.ClientDisconnected {
		s.disconnected.Add(1)
		return
	}
	complete := got.Err == "" && strings.HasPrefix(got.ID, "chatcmpl-"+id+"-") && got.Finish == "length"
	s.verdict.countStress(complete)
	s.verdict.require(complete, "request %d: %s %q, of %q, finished by %q", n, got.Err, got.Detail, got.ID, got.Finish)
}

// countStress counts a request of stress.
func (v *verdict) countStress(completed bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.sent++; completed {
		v.completed++
	} else {
		v.failed["stress"]++
	}
}
