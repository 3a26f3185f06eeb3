package server

import (
	"bytes"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

// Readiness checks and scrapes are no load, and what they find leaves the count of
// requests in flight alone.
func TestHealthChecksKeepInFlightCount(t *testing.T) {
	var ill atomic.Bool
	var scrapes atomic.Int64
	first, finish := make(chan struct{}), make(chan struct{})
	p := startFronted(t, func(c *config.Config) {
		const often = 10 * time.Millisecond
		c.Health.Interval, c.Health.DownInterval, c.Poll.Interval, c.Poll.FastInterval = often, often, often, often
	}, standIn{
		health: func(w http.ResponseWriter, _ *http.Request) {
			if ill.Load() {
				w.WriteHeader(http.StatusInternalServerError)
			}
		},
		metrics: func(w http.ResponseWriter, _ *http.Request) {
			scrapes.Add(1)
			io.WriteString(w, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
		},
		chat: func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			close(first)
			<-finish
			io.WriteString(w, wholeAnswer)
		},
	}.start(t))
	p.ready(1)
	b := p.server.fleet.registry.All()[0]
	before := scrapes.Load()
	p.until("several scrapes", func() bool { return scrapes.Load() > before+5 })
	if n := b.InFlight.Load(); n != 0 {
		t.Errorf("checks and scrapes count as %d requests", n)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.answered()
	}()
	<-first
	for _, state := range []backends.State{backends.Down, backends.Ready} {
		ill.Store(state == backends.Down)
		p.until(state.String(), func() bool { return b.State() == state })
		if n := b.InFlight.Load(); n != 1 {
			t.Errorf("%v: %d in flight, want 1", state, n)
		}
	}
	close(finish)
	<-done
	p.until("none in flight", func() bool { return b.InFlight.Load() == 0 })
}

// Long prompts with images are tens of megabytes: nothing has to be set for them.
func TestLargeBodyByDefault(t *testing.T) {
	var got atomic.Int64
	p := startFronted(t, nil, standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		got.Store(n)
		io.WriteString(w, wholeAnswer)
	}}.start(t))
	p.ready(1)
	body := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
		string(bytes.Repeat([]byte("QUFB"), 10<<20)) + `"}}]}]}`
	if resp, answer, err := p.chat(body); err != nil || resp.StatusCode != http.StatusOK || answer != wholeAnswer || got.Load() != int64(len(body)) {
		t.Errorf("%v, %v, %.300q; %d of %d bytes came", resp, err, answer, got.Load(), len(body))
	}
}
