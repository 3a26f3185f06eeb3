package server

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/lab/freeport"
	"warmroute/lab/sim"
)

func TestStartHookIsDue(t *testing.T) {
	const timeout = time.Minute
	now := time.Unix(1000, 0)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, c := range map[string]struct {
		state hookState
		want  bool
	}{
		"never called":                {hookState{}, true},
		"being called":                {hookState{calling: true}, false},
		"called a while ago":          {hookState{calledAt: ago(timeout - 1)}, false},
		"called a timeout ago":        {hookState{calledAt: ago(timeout)}, true},
		"a call has just failed":      {hookState{calledAt: ago(hookRetryDelay - 1), failed: true}, false},
		"a call failed":               {hookState{calledAt: ago(hookRetryDelay), failed: true}, true},
		"being called after failures": {hookState{calling: true, calledAt: ago(timeout), failed: true}, false},
	} {
		if got := c.state.isDue(timeout, now); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestStartHookFailureLogInterval(t *testing.T) {
	var log syncBuffer
	logger, _ := NewLogger(config.Log{Level: "info", Format: "text"}, &log)
	w := newHookCaller(nil, nil, logger, nil, nil)
	state, now := new(hookState), time.Unix(1000, 0)
	for range 25 { // two minutes
		w.recordResult(state, hookResult{"m", errors.New("refused")}, now)
		now = now.Add(hookRetryDelay)
	}
	if n := strings.Count(log.String(), "start hook failed"); n != 3 || !state.failed {
		t.Errorf("%d failures are logged:\n%s", n, log.String())
	}
	w.recordResult(state, hookResult{"m", nil}, now)
	w.recordResult(state, hookResult{"m", errors.New("refused")}, now)
	if n := strings.Count(log.String(), "start hook failed"); n != 4 {
		t.Errorf("%d failures are logged, one after a success", n)
	}
}

// Requests wait for a model whose replica is not there. The URL is called once for all of them, starts it, and is not
// called again; the queue's own time is shorter than that takes.
func TestStartHooks(t *testing.T) {
	t.Parallel()
	address := freeport.FindAddress(t)
	var calls atomic.Int64
	bodies := make(chan string, 10)
	scaler := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies <- r.Method + " " + r.URL.RequestURI() + " " + string(body)
		if calls.Add(1) == 1 { // the first call fails, and is repeated
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		time.AfterFunc(3*time.Second, func() { startSimReplica(t, sim.Config{Model: "big"}, address) })
	}))
	t.Cleanup(scaler.Close)
	other, _ := startSimReplica(t, sim.Config{Model: "small"}, "127.0.0.1:0")
	f := startFronted(t, func(c *config.Config) {
		c.StartHooks = []config.StartHook{{Model: "big", URL: scaler.URL + "/start?token=hidden", Timeout: time.Minute}}
		c.Routing.Queue.NoneReadyTimeout = time.Second
		c.Health.DownInterval = 100 * time.Millisecond
		c.SSE.QueueKeepalive = time.Second
	}, other, "http://"+address)
	f.ready(1)
	time.Sleep(2 * hookCheckInterval) // nothing waits
	if n := calls.Load(); n != 0 {
		t.Errorf("called %d times while nothing waits", n)
	}
	const requests = 20
	done := make(chan error, requests)
	for i := range requests {
		go func() {
			body := fmt.Sprintf(`{"model":"big","stream":%v,"max_tokens":2,"messages":[{"role":"user","content":"request %d"}]}`, i%2 == 0, i)
			resp, text, err := f.chat(body)
			switch streams := i%2 == 0; {
			case err != nil:
			case resp.StatusCode != http.StatusOK, streams && (!strings.HasPrefix(text, ": keep-alive\n") ||
				!strings.HasSuffix(text, "data: [DONE]\n\n")):
				err = fmt.Errorf("status %d, %s", resp.StatusCode, text)
			}
			done <- err
		}()
	}
	for range requests {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if resp, text, err := f.chat(strings.Replace(plainChat, `"m"`, `"unknown"`, 1)); err != nil || resp.StatusCode != http.StatusNotFound {
		t.Errorf("a model that cannot be woken: %v %s", err, text)
	}
	if n := calls.Load(); n != 2 {
		t.Errorf("called %d times", n)
	}
	if got, want := <-bodies, `POST /start?token=hidden {"model":"big"}`; got != want {
		t.Errorf("called with %s, want %s", got, want)
	}
	f.logs(`msg="start hook failed" model=big err="start_hooks[].url returned 502"`)
	f.logs(`msg="model started" model=big`)
	if strings.Contains(f.log.String(), "hidden") {
		t.Error("the URL's query is logged")
	}
}
