package backends

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends/transport"
)

// change is one call of OnState.
type change struct {
	state  State
	reason string
}

// checked runs a Checker over b and returns its changes.
func checked(t *testing.T, c *Checker, b *Backend) <-chan change {
	changes := make(chan change, 100)
	c.OnState = func(_ *Backend, s State, reason string) { changes <- change{s, reason} }
	watchUntilCleanup(t, c.Watch, b)
	return changes
}

func TestHealthyReplica(t *testing.T) {
	b := replicaAt(t, http.StripPrefix("/prefix", healthyReplica(`"id":"m","root":"/m"`, `"id":"fr","parent":"m"`)))
	b.URL.Path = "/prefix"
	b.SetOptions(Options{APIKey: "secret", Transport: b.Options().Transport})
	var log bytes.Buffer
	got := await(t, checked(t, &Checker{Logger: slog.New(slog.NewTextHandler(&log, nil))}, b))
	if got.state != Ready || b.State() != Ready {
		t.Errorf("%+v, state %v", got, b.State())
	}
	if m := b.Models(); len(m) != 2 || m[1].Parent != "m" {
		t.Errorf("models %+v", m)
	}
	if line := log.String(); !strings.Contains(line, "state=ready") || strings.Contains(line, "secret") {
		t.Errorf("logged %q", line)
	}
}

// A replica that ends a connection on its second request may have found it idle for
// too long: the check asks once more.
func TestCheckAfterStaleConnection(t *testing.T) {
	server := httptest.NewUnstartedServer(nil)
	type connection struct{}
	server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, connection{}, new(atomic.Int32))
	}
	healthy := healthyReplica(`"id":"m","root":"/m"`)
	server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Value(connection{}).(*atomic.Int32).Add(1) == 2 {
			panic(http.ErrAbortHandler)
		}
		healthy.ServeHTTP(w, r)
	})
	server.Start()
	t.Cleanup(server.Close)
	b := backendAt(t, server.URL)
	probe := transport.New(transport.Options{URL: b.URL, IdleTimeout: 100 * time.Millisecond, StaleTimeout: time.Minute})
	t.Cleanup(probe.Close)
	b.SetOptions(Options{Transport: probe})
	if got := await(t, checked(t, &Checker{}, b)); got.state != Ready {
		t.Errorf("%+v", got)
	}
}

func TestDownReasons(t *testing.T) {
	models := func(body string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v1/models" {
				io.WriteString(w, body)
			}
		})
	}
	status := func(path string, code int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == path {
				w.WriteHeader(code)
			}
		})
	}
	for name, c := range map[string]struct {
		handler http.Handler
		want    string
	}{
		"health is not 200":     {status("/health", 503), "/health returned 503"},
		"health redirects":      {status("/health", 302), "/health returned 302"},
		"the key is wrong":      {status("/v1/models", 401), "api_key"},
		"models are missing":    {status("/v1/models", 404), "/v1/models returned 404; the server is not vLLM"},
		"another server":        {http.NotFoundHandler(), "/health returned 404; the server is not vLLM"},
		"an HTTPS server":       {status("/health", 400), "/health returned 400; if the server expects HTTPS"},
		"no model":              {models(`{"data":[]}`), "lists no model"},
		"not a list":            {models(`<html>`), "/v1/models: invalid character '<' looking for beginning of value; the server is not vLLM"},
		"a list without an end": {models(`{"data":[` + strings.Repeat(`{"id":"m"},`, 1<<20)), "longer than 8388608 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			b := replicaAt(t, c.handler)
			if got := await(t, checked(t, &Checker{}, b)); got.state != Down || !strings.Contains(got.reason, c.want) {
				t.Errorf("%+v, want %q", got, c.want)
			}
		})
	}
}

func TestAPIKey(t *testing.T) {
	b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer k" {
			w.WriteHeader(401)
			return
		}
		healthyReplica(`"id":"m"`).ServeHTTP(w, r)
	}))
	b.SetOptions(Options{APIKey: "k", Transport: b.Options().Transport})
	if got := await(t, checked(t, &Checker{}, b)); got.state != Ready {
		t.Errorf("%+v", got)
	}
}

func TestRefusedConnection(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(l net.Listener) *http.Server {
		s := &http.Server{Handler: healthyReplica(`"id":"m"`)}
		go s.Serve(l)
		return s
	}
	first := serve(listener)
	b := backendAt(t, "http://"+listener.Addr().String())
	lost := make(chan string, 100)
	c := &Checker{OnCacheLost: func(_ *Backend, reason string) { lost <- reason }}
	c.SetSettings(HealthSettings{Interval: time.Hour, DownInterval: time.Millisecond})
	changes := checked(t, c, b)
	if got := await(t, changes); got.state != Ready {
		t.Fatalf("%+v", got)
	}
	first.Close()
	b.RequestCheck() // an hour early
	if got := await(t, changes); got.state != Down || !strings.Contains(got.reason, "refused") {
		t.Errorf("%+v", got)
	}
	if len(b.Models()) != 1 {
		t.Error("the models of a backend that is down are gone")
	}
	if reason := await(t, lost); !strings.Contains(reason, "refused") {
		t.Errorf("the cache was lost because: %s", reason)
	}
	if listener, err = net.Listen("tcp", b.URL.Host); err != nil {
		t.Fatal(err)
	}
	defer serve(listener).Close()
	if got := await(t, changes); got.state != Ready {
		t.Errorf("%+v", got)
	}
}

func TestHangingReplicaDelaysNoOtherCheck(t *testing.T) {
	hang := replicaAt(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	well := replicaAt(t, healthyReplica(`"id":"m"`))
	states := make(chan *Backend, 100)
	c := Checker{OnState: func(b *Backend, _ State, _ string) { states <- b }}
	c.SetSettings(HealthSettings{Timeout: time.Hour})
	watchUntilCleanup(t, c.Watch, hang, well)
	if b := await(t, states); b != well {
		t.Errorf("%s was first", b.Name)
	}
}

// The rest is about time, on replicas without sockets.

// health is how a replica responds when asked for its health.
type health func(ctx context.Context) (int, error)

func (h health) RoundTrip(r *http.Request) (*http.Response, error) {
	switch r.URL.Path {
	case "/v1/models":
		return respond(200, vllmModels("1", "p", `"id":"m"`))
	case "/is_paused", "/version":
		return respond(404, `{"detail":"Not Found"}`)
	}
	status, err := h(r.Context())
	if err != nil {
		return nil, err
	}
	return respond(status, "")
}

func well(context.Context) (int, error)      { return 200, nil }
func failing(context.Context) (int, error)   { return 500, nil }
func resetting(context.Context) (int, error) { return 0, syscall.ECONNRESET }
func late(ctx context.Context) (int, error)  { <-ctx.Done(); return 0, ctx.Err() }

// states runs a Checker in virtual time over a replica that responds to check i as
// script[i] says and then is well, and returns the changes with their seconds.
func states(t *testing.T, start State, script ...health) (changes []change, seconds []float64) {
	synctest.Test(t, func(t *testing.T) {
		began, n := time.Now(), 0
		b := virtual(t, health(func(ctx context.Context) (int, error) {
			n++
			if n <= len(script) {
				return script[n-1](ctx)
			}
			return 200, nil
		}).RoundTrip)
		b.SetState(start)
		c := Checker{OnState: func(_ *Backend, s State, reason string) {
			changes = append(changes, change{s, reason})
			seconds = append(seconds, time.Since(began).Seconds())
		}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c.Watch(ctx, b)
	})
	return changes, seconds
}

func TestChecksOverTime(t *testing.T) {
	for _, c := range []struct {
		name   string
		start  State
		script []health
		want   string // the states, in order
		last   float64
		slack  float64 // of the last change, in seconds: the jitter of the waits before it
	}{
		{"the first check is immediate", Down, nil, "ready", 0, 0},
		{"a reset is down at once, and asked again after a second", Down, []health{well, resetting}, "ready down ready", 5 + 1, 0.6},
		{"one timeout is forgiven", Down, []health{well, late, well}, "ready", 0, 0},
		{"two in a row are not", Down, []health{well, late, late}, "ready down ready", 5 + 5 + 1 + 5 + 1, 0.7},
		{"two that are not in a row are forgiven", Down, []health{well, late, well, late}, "ready", 0, 0},
		{"a timeout does not make a backend ready", Down, []health{late, late}, "down ready", 5 + 1 + 5 + 1, 0.2},
		{"another status is down at once", Down, []health{well, failing}, "ready down ready", 6, 0.6},
		{"draining is kept when well", Draining, []health{well, well}, "draining", 0, 0},
		{"draining is kept when not", Draining, []health{resetting, resetting, well}, "draining", 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			changes, seconds := states(t, c.start, c.script...)
			var got []string
			for _, c := range changes {
				got = append(got, c.state.String())
			}
			if strings.Join(got, " ") != c.want {
				t.Fatalf("states %v at %v, want %q", got, seconds, c.want)
			}
			if last := seconds[len(seconds)-1]; last < c.last-c.slack || last > c.last+c.slack {
				t.Errorf("the last change came after %v s, want %v", last, c.last)
			}
		})
	}
}

func TestRequestedChecksAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks, at, most atomic.Int32
		b := virtual(t, health(func(context.Context) (int, error) {
			checks.Add(1)
			most.Store(max(most.Load(), at.Add(1)))
			time.Sleep(10 * time.Millisecond)
			at.Add(-1)
			return 200, nil
		}).RoundTrip)
		c := Checker{}
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { c.Watch(ctx, b) })
		time.Sleep(time.Second)
		for range 1000 { // for a second
			b.RequestCheck()
			time.Sleep(time.Millisecond)
		}
		if n := checks.Load(); n < 5 || n > 12 || most.Load() != 1 {
			t.Errorf("%d checks, %d at once", n, most.Load())
		}
		cancel()
		run.Wait()
	})
}

func TestCheckEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := virtual(t, health(late).RoundTrip)
		b.SetState(Ready)
		c := Checker{OnState: func(*Backend, State, string) { t.Error("a change") }}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c.Watch(ctx, b)
		if b.State() != Ready {
			t.Errorf("state %v", b.State())
		}
	})
}

func TestUnchangedModelsKeepCatalog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var changed atomic.Bool
		b := virtual(t, func(r *http.Request) (*http.Response, error) {
			card := `"id":"m"`
			if changed.Load() {
				card = `"id":"n"`
			}
			// The stamps differ in each response, as vLLM's do.
			return respond(200, vllmModels(time.Now().Format("5"), time.Now().String()[:19], card))
		})
		registry, err := NewRegistry([]*Backend{b})
		if err != nil {
			t.Fatal(err)
		}
		c := Checker{}
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { c.Watch(ctx, b) })
		time.Sleep(time.Second)
		before := registry.Catalog()
		time.Sleep(time.Minute)
		if registry.Catalog() != before || len(before.Models) != 1 {
			t.Errorf("the catalog was rebuilt: %+v", registry.Catalog().Models)
		}
		changed.Store(true)
		time.Sleep(time.Minute)
		if _, ok := registry.Catalog().Find("n"); !ok {
			t.Error("the new model is missing")
		}
		cancel()
		run.Wait()
	})
}

// A server that serves another model has lost its cache, and so has each of its ranks.
func TestOtherBaseModel(t *testing.T) {
	for _, labels := range [][]int{nil, {0, 1}} {
		var model atomic.Value
		model.Store(`"id":"m"`)
		b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			healthyReplica(model.Load().(string)).ServeHTTP(w, r)
		}))
		want := []string{b.Name}
		if registry := newRegistry(t, b); labels != nil {
			want = nil
			for _, rank := range addRanks(registry, b, labels...) {
				want = append(want, rank.Name)
			}
		}
		lost := make(chan string, 100)
		c := &Checker{OnCacheLost: func(b *Backend, reason string) { lost <- b.Name + ": " + reason }}
		c.SetSettings(HealthSettings{Interval: time.Millisecond, DownInterval: time.Millisecond})
		if got := await(t, checked(t, c, b)); got.state != Ready {
			t.Fatalf("%+v", got)
		}
		model.Store(`"id":"other"`)
		for _, name := range want {
			if got := await(t, lost); got != name+": the replica serves another model" {
				t.Errorf("the cache was lost: %s, want %s", got, name)
			}
		}
	}
}
