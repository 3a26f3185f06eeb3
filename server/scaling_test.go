package server

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/router"
)

// A replica whose engines change their number refuses all but health checks. That is a pause: requests go elsewhere or wait,
// its breaker stays closed, and it gets requests again when its model list is back.
func TestScalingReplica(t *testing.T) {
	t.Parallel()
	var scaling atomic.Bool
	var refused atomic.Int64
	replica := standIn{}.handler()
	scaled := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !scaling.Load() || r.URL.Path == "/health" {
			replica.ServeHTTP(w, r)
			return
		}
		if strings.HasPrefix(r.URL.Path, "/v1/chat") {
			refused.Add(1)
			io.Copy(io.Discard, r.Body)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, `{"error":"The model is currently scaling. Please try again later."}`)
	}))
	t.Cleanup(scaled.Close)
	f := startFronted(t, func(c *config.Config) { c.Health.Interval = time.Minute }, scaled.URL)
	b := f.server.registry.All()[0]
	f.ready(1)
	scaling.Store(true)
	const requests = 20
	done := make(chan int, requests)
	for range requests {
		go func() {
			if resp, _, err := f.chat(plainChat); err == nil {
				done <- resp.StatusCode
			} else {
				done <- 0
			}
		}()
	}
	f.until("a check has found it", func() bool { return b.State() == backends.Down && refused.Load() > 0 })
	before := refused.Load()
	time.Sleep(time.Second) // of checks
	if n := refused.Load(); n > before+requests {
		t.Errorf("it was sent %d requests while it refused them", n)
	}
	if reason := b.Status().Reason; !strings.Contains(reason, "changing the number of its engines") {
		t.Errorf("its state is explained as %q", reason)
	}
	scaling.Store(false)
	for range requests {
		if status := <-done; status != http.StatusOK {
			t.Errorf("got %d", status)
		}
	}
	if status := f.server.router.Status(b); status.Opens > 0 {
		t.Errorf("its breaker opened %d times", status.Opens)
	}
}

// A replica that another caller pauses gets nothing new once it says so; with all paused, requests wait.
func TestPauseByAnotherCaller(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, func(c *config.Config) {
		c.Health.Interval, c.Health.DownInterval = 100*time.Millisecond, 100*time.Millisecond
	})
	call := func(replica int, path string) {
		t.Helper()
		resp, err := g.client.Post(g.replicas[replica].URL()+path, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: status %d", path, resp.StatusCode)
		}
	}
	state := func(replica int) router.ConditionState {
		return g.server.router.Status(g.server.registry.All()[replica]).State
	}
	call(0, "/pause?mode=keep&clear_cache=false")
	g.until("the pause is seen", func() bool { return state(0) == router.Paused })
	for i := range 10 {
		if served := <-g.ask(fmt.Sprint("prompt ", i)); served != 1 {
			t.Errorf("request %d went to %d", i, served)
		}
	}
	call(1, "/pause?mode=keep&clear_cache=false")
	g.until("both pauses are seen", func() bool { return state(1) == router.Paused })
	waiting := g.ask("waits")
	g.until("a request waits", func() bool { return g.server.router.CountWaiting() == 1 })
	call(0, "/resume")
	if served := <-waiting; served != 0 {
		t.Errorf("the request that waited went to %d", served)
	}
	call(1, "/resume")
	g.until("both work", func() bool { return state(0) == router.Ready && state(1) == router.Ready })
}
