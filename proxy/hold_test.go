package proxy

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// oneAtATime lets one stream at a time be before its first event.
func oneAtATime(requests int) router.QueueSettings {
	return router.QueueSettings{Requests: requests, Bytes: 1 << 20, BatchRequests: requests, BatchBytes: 1 << 20, Timeout: time.Minute, StepTokens: 1}
}

// gated answers each request when the test says so.
type gated struct {
	replica
	next chan struct{}
}

func newGated() *gated {
	g := &gated{next: make(chan struct{}, 100)}
	g.script = func(s *session) {
		for {
			r, ok := s.request()
			if !ok {
				return
			}
			select {
			case <-g.next:
			case <-g.over:
				return
			}
			if strings.Contains(r.body, `"stream":true`) {
				s.say(streamed(goodStream))
			} else {
				s.say(answered("200 OK", whole))
			}
		}
	}
	return g
}

// answer is what became of a request in the background.
type answer struct {
	status int
	header http.Header
	body   string
	err    error
}

// background sends a request and goes on.
func (f *fleet) background(body string, headers ...string) <-chan answer {
	done := make(chan answer, 1)
	go func() {
		resp, text, err := f.try("/v1/chat/completions", body, headers...)
		if err != nil {
			done <- answer{err: err}
			return
		}
		done <- answer{resp.StatusCode, resp.Header, text, nil}
	}()
	return done
}

// waits until so many requests are held.
func (f *fleet) waits(n int) {
	f.t.Helper()
	eventually(f.t, fmt.Sprint(n, " requests are held"), func() bool { return f.router.WaitingRequests() == n })
}

// asked is a body that tells its request from others. Their prompts share nothing.
func asked(name string, stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":"%s %s"}]}`, stream, name, question)
}

func TestARequestIsHeldUntilAReplicaHasRoom(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			g := newGated()
			f := serveHolding(t, oneAtATime(10), nil, &g.replica)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", stream))
			f.waits(1)
			f.counts("warmroute_hold_requests{class=\"normal\"} 1")
			if len(g.requests()) != 1 {
				t.Error("the second was sent before there was room")
			}
			g.next <- struct{}{}
			if a := <-first; a.status != http.StatusOK || a.header["X-Warmroute-Held-Ms"] != nil {
				t.Errorf("the first got %+v", a)
			}
			g.next <- struct{}{}
			a := <-second
			if ms, err := strconv.Atoi(a.header.Get("X-Warmroute-Held-Ms")); a.status != http.StatusOK || err != nil || ms < 0 {
				t.Errorf("the second got %+v", a)
			}
			f.settled()
			f.counts("warmroute_hold_requests{class=\"normal\"} 0")
			f.counts("warmroute_hold_seconds_count 1")
			f.counts(`warmroute_hold_ends_total{end="sent"} 1`)
			f.counts("warmroute_overhead_seconds_count 2")
		})
	}
}

// The wait is not the proxy's own doing, but it is the client's.
func TestTimeHeldIsNoOverheadAndCountsInTTFT(t *testing.T) {
	const wait = 300 * time.Millisecond
	g := newGated()
	f := serveHolding(t, oneAtATime(10), nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	second := f.background(asked("second", true))
	f.waits(1)
	time.Sleep(wait) // it is held at least so long
	g.next <- struct{}{}
	<-first
	g.next <- struct{}{}
	a := <-second
	held, err := strconv.Atoi(a.header.Get("X-Warmroute-Held-Ms"))
	if err != nil || held < int(wait.Milliseconds()) {
		t.Errorf("held for %d ms (%v), want at least %v", held, err, wait)
	}
	overhead, err := strconv.Atoi(a.header.Get("X-Warmroute-Overhead-Us"))
	if err != nil || overhead < 0 || overhead >= held*1000 {
		t.Errorf("overhead %d µs (%v) of a request held for %d ms", overhead, err, held)
	}
	f.settled()
	f.counts(`warmroute_ttft_seconds_bucket{backend="r0",model="m",le="0.25"} 0`)
}

func TestAFullHoldQueueIsA429(t *testing.T) {
	long := strings.Repeat("x", 600_000)
	for _, c := range []struct {
		name string
		hold router.QueueSettings
		body string
	}{
		{"in number", oneAtATime(1), askWhole},
		{"in bytes", oneAtATime(10), strings.Replace(askWhole, "What", long, 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGated()
			f := serveHolding(t, c.hold, nil, &g.replica)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", false))
			f.waits(1)
			resp, text := f.post("/v1/chat/completions", c.body)
			after, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			if resp.StatusCode != http.StatusTooManyRequests || err != nil || after < 1 ||
				!strings.Contains(text, `"src":"warmroute"`) || !strings.Contains(text, "hold_queue_full") {
				t.Errorf("got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
			}
			g.next <- struct{}{}
			g.next <- struct{}{}
			for _, a := range []answer{<-first, <-second} {
				if a.status != http.StatusOK {
					t.Errorf("another request got %+v", a)
				}
			}
			f.counts(`warmroute_hold_ends_total{end="full"} 1`)
			f.counts(`warmroute_requests_total{backend="",code="429",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

func TestHeldTooLong(t *testing.T) {
	g := newGated()
	hold := oneAtATime(10)
	hold.Timeout = 50 * time.Millisecond
	f := serveHolding(t, hold, nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	resp, text := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, "held_too_long") {
		t.Errorf("where there is no room: got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
	}
	g.next <- struct{}{}
	<-first
	f.backends[0].SetState(backends.Down)
	resp, text = f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, "no_replica") {
		t.Errorf("where none is ready: got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
	}
	f.counts(`warmroute_hold_ends_total{end="too_long"} 1`)
	f.counts(`warmroute_hold_ends_total{end="none_ready"} 1`)
	if len(g.requests()) != 1 {
		t.Errorf("the replica saw %d requests", len(g.requests()))
	}
}

func TestMaxInFlight(t *testing.T) {
	for _, c := range []struct {
		name string
		hold router.QueueSettings
	}{
		{"nothing is held", router.QueueSettings{}},
		{"held", router.QueueSettings{Requests: 10, Timeout: time.Minute}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGated()
			f := serveHolding(t, c.hold, nil, &g.replica)
			limited := *f.backends[0].Terms()
			limited.MaxInFlight = 1
			f.backends[0].SetTerms(limited)
			first := f.background(asked("first", false))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", false))
			if c.hold.Requests == 0 {
				if a := <-second; a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "replicas_full") {
					t.Errorf("the second got %+v", a)
				}
				g.next <- struct{}{}
			} else {
				f.waits(1)
				g.next <- struct{}{}
				g.next <- struct{}{}
				if a := <-second; a.status != http.StatusOK {
					t.Errorf("the second got %+v", a)
				}
			}
			if a := <-first; a.status != http.StatusOK {
				t.Errorf("the first got %+v", a)
			}
		})
	}
}

func TestClientThatLeavesWhileHeldIsGoneAtOnce(t *testing.T) {
	g := newGated()
	f := serveHolding(t, oneAtATime(10), nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	held := f.proxy.bodies.held.Load()
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(asked("second", true)))
	gone := make(chan error, 1)
	go func() {
		_, err := f.client.Do(req)
		gone <- err
	}()
	f.waits(1)
	if f.proxy.bodies.held.Load() <= held {
		t.Error("the body of a held request is not accounted for")
	}
	leave()
	if err := <-gone; err == nil {
		t.Error("was answered")
	}
	f.waits(0)
	eventually(t, "its body is freed", func() bool { return f.proxy.bodies.held.Load() == held })
	f.counts(`warmroute_aborts_total{phase="held"} 1`)
	f.counts(`warmroute_hold_ends_total{end="left"} 1`)
	f.counts(`warmroute_requests_total{backend="",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
	g.next <- struct{}{}
	<-first
	if len(g.requests()) != 1 {
		t.Error("a request without a client was sent")
	}
}

func TestPriorityGoesFirst(t *testing.T) {
	g := newGated()
	f := serveHolding(t, oneAtATime(10), nil, &g.replica)
	all := []<-chan answer{f.background(asked("first", true))}
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	for i, priority := range []string{"5", "", "3", "0"} {
		body := asked(fmt.Sprint("request ", i), true)
		if priority == "" {
			all = append(all, f.background(body))
		} else {
			all = append(all, f.background(body, priorityHeader, priority))
		}
		f.waits(i + 1)
	}
	var order []string
	for i, done := range all {
		g.next <- struct{}{}
		eventually(t, "the next is sent", func() bool { return len(g.requests()) == min(i+2, len(all)) })
		defer func() { <-done }()
	}
	for _, r := range g.requests()[1:] {
		_, name, _ := strings.Cut(r.body, "request ")
		order = append(order, name[:1])
	}
	if want := []string{"1", "3", "2", "0"}; !slices.Equal(order, want) {
		t.Errorf("sent in the order %v, want %v", order, want)
	}
}
