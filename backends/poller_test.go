package backends

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends/transport"
)

// vllmMetrics is a replica's /metrics, cut down to what tells its life.
func vllmMetrics(start, prompt float64, running, waiting int) string {
	return fmt.Sprintf("process_start_time_seconds %g\nvllm:prompt_tokens_total %g\nvllm:generation_tokens_total 1\n"+
		"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n", start, prompt, running, waiting)
}

func TestPollOverASocket(t *testing.T) {
	asked := make(chan http.Header, 1)
	b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			select {
			case asked <- r.Header.Clone():
			default:
			}
		}
		http.ServeFile(w, r, "vllm/testdata/metrics-0.32.txt")
	}))
	b.SetOptions(Options{APIKey: "k", Transport: b.Options().Transport})
	b.InFlight.Store(3)
	loads := make(chan *Load, 1)
	p := Poller{OnLoad: func(_ *Backend, l *Load) { loads <- l }}
	watchUntilCleanup(t, p.Watch, b)
	l := await(t, loads)
	if l != b.Load() || l.CacheTokens != 16384 || l.OwnInFlight != 3 || l.PolledAt.IsZero() {
		t.Errorf("%+v", l)
	}
	h := await(t, asked)
	if h.Get("Accept-Encoding") != "identity" || !strings.HasPrefix(h.Get("Accept"), "text/plain") || h.Get("Authorization") != "Bearer k" {
		t.Errorf("asked with %v", h)
	}
}

func TestPollsDoNotOverlap(t *testing.T) {
	var at, most atomic.Int32
	polls := make(chan struct{}, 100)
	b := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		most.Store(max(most.Load(), at.Add(1)))
		time.Sleep(20 * time.Millisecond) // twenty intervals
		io.WriteString(w, vllmMetrics(1, 1, 0, 0))
		at.Add(-1)
		polls <- struct{}{}
	}))
	p := Poller{}
	p.SetSettings(PollSettings{Interval: time.Millisecond, Timeout: 10 * time.Second})
	watchUntilCleanup(t, p.Watch, b)
	for range 5 {
		await(t, polls)
	}
	if n := most.Load(); n != 1 {
		t.Errorf("%d polls at once", n)
	}
}

func TestHangingReplicaDelaysNoOtherPoll(t *testing.T) {
	hang := replicaAt(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	well := replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, vllmMetrics(1, 1, 0, 0)) }))
	loads := make(chan *Backend, 100)
	p := Poller{OnLoad: func(b *Backend, _ *Load) {
		select {
		case loads <- b:
		default:
		}
	}}
	p.SetSettings(PollSettings{Interval: time.Millisecond, Timeout: time.Hour})
	watchUntilCleanup(t, p.Watch, hang, well) // and Follow ends at once when asked to, the hanging poll included
	for range 3 {
		if b := await(t, loads); b != well {
			t.Errorf("a load of %s", b.Name)
		}
	}
}

func TestPollErrors(t *testing.T) {
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    string
	}{
		"a status": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, "/metrics returned 500"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		}, "/metrics returned 302"},
		"a page":   {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>\n") }, "metrics line 1"},
		"too much": {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat("a 1\n", 1000)) }, "longer than 1000 bytes"},
		"a broken body": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			io.WriteString(w, "a 1\n")
		}, "unexpected EOF"},
		"no response": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "deadline exceeded"},
		"half a response": {func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "a 1\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, "deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			b := replicaAt(t, c.handler)
			errs := make(chan error, 100)
			p := Poller{MaxBytes: 1000,
				OnError: func(_ *Backend, err error) {
					select {
					case errs <- err:
					default:
					}
				}}
			p.SetSettings(PollSettings{Interval: time.Millisecond, Timeout: 200 * time.Millisecond})
			watchUntilCleanup(t, p.Watch, b)
			if err := await(t, errs); !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), b.Name) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// pollsIn counts the polls of a replica within a minute of virtual time.
func pollsIn(t *testing.T, f func() (*http.Response, error), own int64) (polls int) {
	synctest.Test(t, func(t *testing.T) {
		b := virtual(t, func(*http.Request) (*http.Response, error) { polls++; return f() })
		b.InFlight.Store(own)
		p := Poller{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p.Watch(ctx, b)
	})
	return polls
}

func TestOwnRequestsDuringPoll(t *testing.T) {
	for name, c := range map[string]struct{ before, after int64 }{"sent": {1, 5}, "ended": {5, 1}} {
		var b *Backend
		b = replicaAt(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			b.InFlight.Store(c.after)
			io.WriteString(w, "vllm:num_requests_running 5\n")
		}))
		b.InFlight.Store(c.before)
		loads := make(chan *Load, 1)
		p := Poller{OnLoad: func(_ *Backend, l *Load) { loads <- l }}
		p.SetSettings(PollSettings{Interval: time.Hour, Timeout: time.Minute})
		watchUntilCleanup(t, p.Watch, b)
		if l := await(t, loads); l.OwnInFlight != 5 {
			t.Errorf("%s: %d in flight are ours, want 5", name, l.OwnInFlight)
		}
	}
}

func TestPollInterval(t *testing.T) {
	metrics := func(running, waiting int) func() (*http.Response, error) {
		return func() (*http.Response, error) { return respond(200, vllmMetrics(1, 1, running, waiting)) }
	}
	for _, c := range []struct {
		name     string
		replica  func() (*http.Response, error)
		own      int64
		min, max int // polls a minute, jitter included
	}{
		{"idle", metrics(0, 0), 0, 54, 68},
		{"only our requests", metrics(5, 0), 5, 54, 68},
		{"external load", metrics(6, 0), 5, 216, 270},
		{"a queue", metrics(3, 2), 5, 216, 270},
		{"queues unknown", func() (*http.Response, error) { return respond(200, "a 1\n") }, 0, 54, 68},
		{"no metrics", func() (*http.Response, error) { return respond(404, "") }, 0, 6, 7},
		{"refused", func() (*http.Response, error) { return nil, errors.New("connection refused") }, 0, 54, 68},
		{"half a second late", func() (*http.Response, error) { time.Sleep(500 * time.Millisecond); return metrics(0, 0)() }, 0, 36, 46},
	} {
		t.Run(c.name, func(t *testing.T) {
			if n := pollsIn(t, c.replica, c.own); n < c.min || n > c.max {
				t.Errorf("%d polls in a minute, want %d to %d", n, c.min, c.max)
			}
		})
	}
}

func TestLoadUnknownAfterMissedPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		b := virtual(t, func(*http.Request) (*http.Response, error) {
			if down.Load() {
				return nil, errors.New("connection refused")
			}
			return respond(200, vllmMetrics(1, 1, 0, 0))
		})
		b.SetState(Ready)
		var missed atomic.Int32
		p := Poller{OnError: func(b *Backend, _ error) {
			if n := missed.Add(1); (b.Load() == nil) != (n >= 3) {
				t.Errorf("after %d missed polls the load is %v", n, b.Load())
			}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { p.Watch(ctx, b); close(done) }()
		time.Sleep(3 * time.Second)
		if b.Load() == nil {
			t.Fatal("no load")
		}
		down.Store(true)
		time.Sleep(6 * time.Second)
		if missed.Load() < 4 || b.Load() != nil {
			t.Errorf("%d missed, load %v", missed.Load(), b.Load())
		}
		down.Store(false)
		time.Sleep(2 * time.Second)
		if b.Load() == nil || b.State() != Ready {
			t.Errorf("load %v, state %v", b.Load(), b.State())
		}
		cancel()
		<-done
	})
}

func TestFirstPollWithoutDescriptors(t *testing.T) {
	polls := make(chan struct{})
	b := New("a", &url.URL{Scheme: "http", Host: "a:80"}, "", roundTrip(func(*http.Request) (*http.Response, error) {
		polls <- struct{}{}
		return nil, &transport.ConnectError{Addr: "a:80", Err: syscall.EMFILE}
	}))
	p := Poller{OnError: func(_ *Backend, err error) { t.Errorf("counted as a failed poll: %v", err) }}
	p.SetSettings(PollSettings{Interval: time.Millisecond, Timeout: time.Minute})
	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { p.Watch(ctx, b) })
	for range 3 {
		await(t, polls)
	}
	stop()
	go func() {
		for range polls {
		}
	}()
	following.Wait()
	close(polls)
}

func TestNoMetrics(t *testing.T) {
	b := replicaAt(t, http.NotFoundHandler())
	b.SetState(Ready)
	b.SetLoad(&Load{})
	errs := make(chan error, 1)
	p := Poller{OnError: func(_ *Backend, err error) { errs <- err }}
	watchUntilCleanup(t, p.Watch, b)
	if err := await(t, errs); !errors.Is(err, errNoMetrics) {
		t.Error(err)
	}
	if b.Load() != nil || b.State() != Ready {
		t.Errorf("load %v, state %v", b.Load(), b.State())
	}
}

func TestCacheLoss(t *testing.T) {
	config := func(tokens int) string {
		return fmt.Sprintf("vllm:cache_config_info{kv_cache_size_tokens=\"%d\"} 1\n", tokens)
	}
	asleep := "vllm:engine_sleep_state{sleep_state=\"awake\"} 0\n"
	for name, c := range map[string]struct{ before, after, want string }{
		"another start time":  {vllmMetrics(1, 9, 0, 0), vllmMetrics(2, 9, 0, 0), "restarted"},
		"a counter decreased": {vllmMetrics(0, 9, 0, 0), vllmMetrics(0, 8, 0, 0), "decreased"},
		"prefix queries went back": {"vllm:prefix_cache_queries 9\nvllm:prefix_cache_hits 1\n",
			"vllm:prefix_cache_queries 8\nvllm:prefix_cache_hits 1\n", "decreased"},
		"asleep":                     {vllmMetrics(1, 9, 0, 0), vllmMetrics(1, 9, 0, 0) + asleep, "asleep"},
		"another size":               {config(100), config(200), "from 100 to 200"},
		"more tokens":                {vllmMetrics(1, 8, 0, 0), vllmMetrics(1, 9, 0, 0), ""},
		"a counter went away":        {vllmMetrics(1, 8, 0, 0), "process_start_time_seconds 1\n", ""},
		"a size that was not known":  {vllmMetrics(1, 8, 0, 0), vllmMetrics(1, 8, 0, 0) + config(100), ""},
		"still asleep":               {asleep, asleep, ""},
		"awake again, lost long ago": {asleep, vllmMetrics(1, 9, 0, 0), ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				polls := 0
				b := virtual(t, func(*http.Request) (*http.Response, error) {
					polls++
					switch polls {
					case 1:
						return respond(200, c.before)
					case 2:
						return nil, errors.New("connection reset") // a restart has its gap
					}
					return respond(200, c.after)
				})
				var reported []string
				p := Poller{
					OnCacheLost: func(_ *Backend, reason string) { reported = append(reported, reason) },
					OnLoad: func(*Backend, *Load) {
						if polls == 1 {
							reported = nil // what the first poll said of itself
						} else if polls == 3 && c.want != "" && len(reported) != 1 {
							t.Error("the loss was not reported before the load")
						}
					},
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				p.Watch(ctx, b)
				switch got := strings.Join(reported, "; "); {
				case c.want == "" && got != "", len(reported) > 1, !strings.Contains(got, c.want):
					t.Errorf("reported %q, want %q", got, c.want)
				}
			})
		})
	}
}

func TestSleepingReplicaLosesCache(t *testing.T) {
	if cacheLossReason(nil, &Load{Asleep: true}) == "" || cacheLossReason(nil, &Load{}) != "" {
		t.Error("the first poll")
	}
}
