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
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/proxy/apikey"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// serveOneAtATime is serveWithQueue with backends that may have one request in flight.
func serveOneAtATime(t testing.TB, hold router.QueueSettings, change func(*Options), replicas ...*replica) *fleet {
	t.Helper()
	f := serveWithQueue(t, hold, change, replicas...)
	for _, b := range f.backends {
		limited := *b.Options()
		limited.MaxInFlight = 1
		b.SetOptions(limited)
	}
	return f
}

// queueOf is a queue for so many requests of each class.
func queueOf(requests int) router.QueueSettings {
	return router.QueueSettings{Requests: requests, Bytes: 1 << 20, LowPriorityRequests: requests, LowPriorityBytes: 1 << 20,
		NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}
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

// awaitQueued waits until n requests are queued.
func (f *fleet) awaitQueued(n int) {
	f.t.Helper()
	eventually(f.t, fmt.Sprint(n, " requests are queued"), func() bool { return f.router.CountWaiting() == n })
}

// asked is a body that tells its request from others. Their prompts share nothing.
func asked(name string, stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":"%s %s"}]}`, stream, name, question)
}

// TestTTFTUnreachable has a request wait for a busy replica until its first token is due.
func TestTTFTUnreachable(t *testing.T) {
	g := newGated()
	f := serveOneAtATime(t, queueOf(10), func(o *Options) { o.RefuseLate = true }, &g.replica)
	first := f.background(asked("first", false))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	resp, body := f.post("/v1/chat/completions", asked("second", false), upstream.TTFTHeader, "1")
	if resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(body, `"code":"ttft_unreachable"`) ||
		!strings.Contains(body, "target of 1ms") || resp.Header.Get("Retry-After") == "" {
		t.Errorf("got %s, Retry-After %q, %s", resp.Status, resp.Header.Get("Retry-After"), body)
	}
	f.awaitMetric(`warmroute_queue_ends_total{result="late"} 1`)
	g.next <- struct{}{}
	if a := <-first; a.status != http.StatusOK {
		t.Errorf("the first request got %d, %v", a.status, a.err)
	}
}

func TestQueueUntilCapacity(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			g := newGated()
			f := serveOneAtATime(t, queueOf(10), nil, &g.replica)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", stream))
			f.awaitQueued(1)
			f.awaitMetric("warmroute_queue_requests{class=\"normal\"} 1")
			if len(g.requests()) != 1 {
				t.Error("the second was sent before there was room")
			}
			g.next <- struct{}{}
			if a := <-first; a.status != http.StatusOK || a.header["X-Warmroute-Queue-Ms"] != nil {
				t.Errorf("the first got %+v", a)
			}
			g.next <- struct{}{}
			a := <-second
			if ms, err := strconv.Atoi(a.header.Get("X-Warmroute-Queue-Ms")); a.status != http.StatusOK || err != nil || ms < 0 {
				t.Errorf("the second got %+v", a)
			}
			f.awaitIdle()
			f.awaitMetric("warmroute_queue_requests{class=\"normal\"} 0")
			f.awaitMetric("warmroute_queue_seconds_count 1")
			f.awaitMetric(`warmroute_queue_ends_total{result="sent"} 1`)
			f.awaitMetric("warmroute_overhead_seconds_count 2")
		})
	}
}

// The wait is not the proxy's own doing, but it is the client's.
func TestQueueTimeInTTFT(t *testing.T) {
	t.Parallel()
	const wait = 300 * time.Millisecond
	g := newGated()
	f := serveOneAtATime(t, queueOf(10), nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	second := f.background(asked("second", true))
	f.awaitQueued(1)
	time.Sleep(wait) // it is queued at least so long
	g.next <- struct{}{}
	<-first
	g.next <- struct{}{}
	a := <-second
	held, err := strconv.Atoi(a.header.Get("X-Warmroute-Queue-Ms"))
	if err != nil || held < int(wait.Milliseconds()) {
		t.Errorf("queued for %d ms (%v), want at least %v", held, err, wait)
	}
	overhead, err := strconv.Atoi(a.header.Get("X-Warmroute-Overhead-Us"))
	if err != nil || overhead < 0 || overhead >= held*1000 {
		t.Errorf("overhead %d µs (%v) of a request queued for %d ms", overhead, err, held)
	}
	f.awaitIdle()
	f.awaitMetric(`warmroute_ttft_seconds_bucket{backend="r0",model="m",le="0.25"} 0`)
}

func TestQueueFullStatus429(t *testing.T) {
	long := strings.Repeat("x", 600_000)
	for _, c := range []struct {
		name string
		hold router.QueueSettings
		body string
	}{
		{"in number", queueOf(1), askWhole},
		{"in bytes", queueOf(10), strings.Replace(askWhole, "What", long, 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGated()
			f := serveOneAtATime(t, c.hold, nil, &g.replica)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", false))
			f.awaitQueued(1)
			resp, text := f.post("/v1/chat/completions", c.body)
			after, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			if resp.StatusCode != http.StatusTooManyRequests || err != nil || after < 1 ||
				!strings.Contains(text, `"src":"warmroute"`) || !strings.Contains(text, "queue_full") {
				t.Errorf("got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
			}
			g.next <- struct{}{}
			g.next <- struct{}{}
			for _, a := range []answer{<-first, <-second} {
				if a.status != http.StatusOK {
					t.Errorf("another request got %+v", a)
				}
			}
			f.awaitMetric(`warmroute_queue_ends_total{result="full"} 1`)
			f.awaitMetric(`warmroute_requests_total{backend="",code="429",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

func TestQueueTimeout(t *testing.T) {
	t.Parallel()
	g := newGated()
	hold := queueOf(10)
	hold.BusyTimeout, hold.NoneReadyTimeout = 50*time.Millisecond, 50*time.Millisecond
	f := serveOneAtATime(t, hold, nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	resp, text := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, `"code":"busy"`) {
		t.Errorf("where there is no room: got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
	}
	g.next <- struct{}{}
	<-first
	f.backends[0].SetState(backends.Down)
	resp, text = f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, "none_ready") {
		t.Errorf("where none is ready: got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
	}
	f.awaitMetric(`warmroute_queue_ends_total{result="busy"} 1`)
	f.awaitMetric(`warmroute_queue_ends_total{result="none_ready"} 1`)
	if len(g.requests()) != 1 {
		t.Errorf("the replica saw %d requests", len(g.requests()))
	}
}

func TestMaxInFlight(t *testing.T) {
	for _, c := range []struct {
		name string
		hold router.QueueSettings
	}{
		{"no queue", router.QueueSettings{}},
		{"held", router.QueueSettings{Requests: 10, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGated()
			f := serveWithQueue(t, c.hold, nil, &g.replica)
			limited := *f.backends[0].Options()
			limited.MaxInFlight = 1
			f.backends[0].SetOptions(limited)
			first := f.background(asked("first", false))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			second := f.background(asked("second", false))
			if c.hold.Requests == 0 {
				if a := <-second; a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" ||
					!strings.Contains(a.body, "replicas_full") {
					t.Errorf("the second got %+v", a)
				}
				g.next <- struct{}{}
			} else {
				f.awaitQueued(1)
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

func TestDisconnectWhileQueued(t *testing.T) {
	g := newGated()
	f := serveOneAtATime(t, queueOf(10), nil, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	held := f.proxy.tenants.BodyBytesInUse()
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(asked("second", true)))
	gone := make(chan error, 1)
	go func() {
		_, err := f.client.Do(req)
		gone <- err
	}()
	f.awaitQueued(1)
	if f.proxy.tenants.BodyBytesInUse() <= held {
		t.Error("the body of a queued request is not accounted for")
	}
	leave()
	if err := <-gone; err == nil {
		t.Error("was answered")
	}
	f.awaitQueued(0)
	eventually(t, "its body is freed", func() bool { return f.proxy.tenants.BodyBytesInUse() == held })
	f.awaitMetric(`warmroute_disconnected_requests_total{phase="queued"} 1`)
	f.awaitMetric(`warmroute_queue_ends_total{result="disconnected"} 1`)
	f.awaitMetric(`warmroute_requests_total{backend="",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
	g.next <- struct{}{}
	<-first
	if len(g.requests()) != 1 {
		t.Error("a request without a client was sent")
	}
}

func TestPriorityOrder(t *testing.T) {
	g := newGated()
	f := serveOneAtATime(t, queueOf(10), nil, &g.replica)
	all := []<-chan answer{f.background(asked("first", true))}
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	for i, priority := range []string{"5", "", "3", "0"} {
		body := asked(fmt.Sprint("request ", i), true)
		if priority == "" {
			all = append(all, f.background(body))
		} else {
			all = append(all, f.background(body, upstream.PriorityHeader, priority))
		}
		f.awaitQueued(i + 1)
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

// heldTooLong requires the answer to a request that had to wait for too long.
func heldTooLong(t *testing.T, name string, a answer) {
	t.Helper()
	if a.status != http.StatusTooManyRequests || !strings.Contains(a.body, `"code":"busy"`) {
		t.Errorf("%s: got %d %s %v", name, a.status, a.body, a.err)
	}
}

// TestKeyQueueTime holds that a key's queue_time takes the place of
// routing.queue.none_ready_timeout, whether it is longer or shorter.
func TestKeyQueueTime(t *testing.T) {
	t.Parallel()
	users := withKeys(keyOf("plain", nil),
		keyOf("patient", func(k *apikey.Key) { k.QueueTime = time.Hour }),
		keyOf("hasty", func(k *apikey.Key) { k.QueueTime = 50 * time.Millisecond }))
	holding := func(d time.Duration) router.QueueSettings {
		hold := queueOf(10)
		hold.NoneReadyTimeout, hold.BusyTimeout = d, d
		return hold
	}
	t.Run("longer", func(t *testing.T) {
		g := newGated()
		f := serveOneAtATime(t, holding(50*time.Millisecond), users, &g.replica)
		first := f.background(asked("first", true), bearer("plain")...)
		eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
		patient := f.background(asked("patient", false), bearer("patient")...)
		f.awaitQueued(1)
		// It comes later, so the other one has waited for longer when this one is refused.
		heldTooLong(t, "without a queue time", <-f.background(asked("plain", false), bearer("plain")...))
		f.awaitQueued(1)
		g.next <- struct{}{}
		g.next <- struct{}{}
		for _, a := range []answer{<-first, <-patient} {
			if a.status != http.StatusOK {
				t.Errorf("got %+v", a)
			}
		}
	})
	t.Run("shorter", func(t *testing.T) {
		g := newGated()
		f := serveOneAtATime(t, holding(time.Hour), users, &g.replica)
		first := f.background(asked("first", true), bearer("plain")...)
		eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
		plain := f.background(asked("plain", false), bearer("plain")...)
		f.awaitQueued(1)
		heldTooLong(t, "with one", <-f.background(asked("hasty", false), bearer("hasty")...))
		f.awaitQueued(1)
		g.next <- struct{}{}
		g.next <- struct{}{}
		for _, a := range []answer{<-first, <-plain} {
			if a.status != http.StatusOK {
				t.Errorf("got %+v", a)
			}
		}
	})
	t.Run("for a place on a full replica", func(t *testing.T) {
		full := &replica{script: always(answered("503 Service Unavailable", `{"error":{"message":"full"}}`))}
		f := serveWithQueue(t, holding(time.Hour), users, full)
		f.backends[0].InFlight.Add(1) // a request that never ends, so that no place falls free
		defer f.backends[0].InFlight.Add(-1)
		if a := <-f.background(askWhole, bearer("hasty")...); a.status != http.StatusServiceUnavailable {
			t.Errorf("got %+v", a)
		}
	})
	t.Run("while connections are refused", func(t *testing.T) {
		g := newGated()
		f := serveOneAtATime(t, holding(time.Hour), users, &g.replica)
		g.listener.Close()
		if a := <-f.background(askWhole, bearer("hasty")...); a.status != http.StatusServiceUnavailable {
			t.Errorf("got %+v", a)
		}
	})
}

// TestQueueBoundsPerPriorityClass holds that requests of one priority class that
// fill its part of the queue leave the others' to these.
func TestQueueBoundsPerPriorityClass(t *testing.T) {
	t.Parallel()
	classes := []struct {
		name string
		may  int
	}{{"low", 4}, {"normal", 2}, {"urgent", 2}}
	users := withKeys(keyOf("normal", nil),
		keyOf("urgent", func(k *apikey.Key) { k.Priority = -1 }),
		keyOf("low", func(k *apikey.Key) { k.Priority = 10 }))
	f := func(name string, hold router.QueueSettings, text string) {
		t.Run(name, func(t *testing.T) {
			hold.NoneReadyTimeout, hold.BusyTimeout = time.Minute, time.Minute
			g := newGated()
			f := serveOneAtATime(t, hold, users, &g.replica)
			all := []<-chan answer{f.background(asked("first", true), bearer("normal")...)}
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			for _, class := range classes {
				for i := range class.may {
					all = append(all, f.background(asked(fmt.Sprint(class.name, i, text), false), bearer(class.name)...))
					f.awaitQueued(len(all) - 1)
				}
				resp, body := f.post("/v1/chat/completions", asked(class.name+text, false), bearer(class.name)...)
				if resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(body, "queue_full") {
					t.Errorf("one more %s request than may wait: got %d %s", class.name, resp.StatusCode, body)
				}
			}
			for _, class := range classes {
				f.awaitMetric(fmt.Sprintf("warmroute_queue_requests{class=%q} %d", class.name, class.may))
			}
			for range all {
				g.next <- struct{}{}
			}
			for _, done := range all {
				if a := <-done; a.status != http.StatusOK {
					t.Errorf("got %+v", a)
				}
			}
		})
	}
	f("requests", router.QueueSettings{Requests: 2, LowPriorityRequests: 4}, "")
	long := strings.Repeat("x", 20_000)
	// Of each request 32 KiB of body and the blocks of 20 KB of prompt are counted.
	f("bytes", router.QueueSettings{Requests: 100, LowPriorityRequests: 100, Bytes: 80_000, LowPriorityBytes: 150_000}, long)
}

// TestLowPriorityReserve holds that low-priority requests leave a tenth
// of the limits on all requests together to others.
func TestLowPriorityReserve(t *testing.T) {
	t.Parallel()
	const inLowPriority = 18
	f := func(name string, limits func(*Options), code string) {
		t.Run(name, func(t *testing.T) {
			g := newGated()
			hold := router.QueueSettings{Requests: 10, LowPriorityRequests: 100, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}
			f := serveOneAtATime(t, hold, limits, &g.replica)
			var all []<-chan answer
			for i := range inLowPriority {
				all = append(all, f.background(asked(fmt.Sprint(i), true), upstream.PriorityHeader, "5"))
				eventually(t, "it is sent or waits", func() bool { return len(g.requests())+f.router.CountWaiting() == i+1 })
			}
			resp, body := f.post("/v1/chat/completions", asked("low", true), upstream.PriorityHeader, "5")
			if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, code) {
				t.Errorf("one low-priority request more: got %d %s", resp.StatusCode, body)
			}
			for i := range 2 {
				all = append(all, f.background(asked(fmt.Sprint("interactive", i), true)))
				eventually(t, "an interactive request is sent or waits", func() bool {
					return len(g.requests())+f.router.CountWaiting() == inLowPriority+i+1
				})
			}
			for range all {
				g.next <- struct{}{}
			}
			for _, done := range all {
				if a := <-done; a.status != http.StatusOK {
					t.Errorf("got %+v", a)
				}
			}
		})
	}
	f("in flight", func(o *Options) { o.InFlight = 20 }, "too_many_requests")
	f("bodies", func(o *Options) { o.BodyBytesTotal = 20 * 4 << 10 }, "bodies_too_large")
}

// TestLowPriorityQueueTime holds that a low-priority request
// waits beside an interactive one on the only replica, and is sent after half of the
// time for which it may wait.
func TestLowPriorityQueueTime(t *testing.T) {
	t.Parallel()
	started, end := make(chan struct{}, 10), make(chan struct{})
	r := &replica{script: func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			started <- struct{}{}
			select {
			case <-end:
			case <-s.replica.over:
			}
			s.say(answered("200 OK", whole))
		}
	}}
	users := withKeys(keyOf("normal", func(k *apikey.Key) { k.RouteHeaders = true }),
		keyOf("low", func(k *apikey.Key) { k.Priority, k.QueueTime, k.RouteHeaders = 10, time.Second, true }))
	// Low-priority requests may hardly take any time: none but the first is sent otherwise.
	hold := router.QueueSettings{Requests: 10, LowPriorityRequests: 10, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour,
		LowPrioritySlowdown: 1e-6}
	f := serveWithQueue(t, hold, users, r)
	var all []<-chan answer
	for _, key := range []string{"normal", "low", "low", "normal"} {
		all = append(all, f.background(asked(fmt.Sprint(len(all)), false), bearer(key)...))
		if len(all) != 3 {
			<-started
		}
	}
	<-started
	close(end)
	for i, done := range all {
		a := <-done
		ms, _ := strconv.Atoi(a.header.Get("X-Warmroute-Queue-Ms"))
		if a.status != http.StatusOK || i == 2 && ms < 500 {
			t.Errorf("request %d was queued for %d ms: %+v", i, ms, a)
		}
	}
}

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
		if err := s.Bind("127.0.0.1:0"); err != nil {
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

func TestStreamBurst(t *testing.T) {
	const streams, tokens = 2000, 8
	before := runtime.NumGoroutine()
	f := simulate(t, 4, "prefix", engine.Config{Speed: 20, MaxSeqs: streams, KVTokens: 4_000_000})
	open := make(chan struct{})
	for _, b := range f.backends {
		terms := *b.Options()
		terms.Transport = &gate{terms.Transport.(*transport.Transport), open}
		b.SetOptions(terms)
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
	f.awaitIdle()
	f.client.CloseIdleConnections()
	for _, b := range f.backends {
		b.Options().Transport.(*gate).CloseIdleConnections()
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
	body := fmt.Sprintf(`{"model":"m","stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"Question %d"}]}`,
		tokens, i)
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
func TestBusyMatch(t *testing.T) {
	t.Parallel()
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
	body := fmt.Sprintf(`{"model":"m","ignore_eos":true,"max_tokens":%d,"messages":[{"role":"system","content":"%s"},{"role":"user",`+
		`"content":"%s"}]}`, tokens, system, question)
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

func TestPanicInRoutingAnswered(t *testing.T) {
	f := serve(t, nil, &replica{})
	r := &request{proxy: f.proxy}
	r.input.request.Backends = f.backends
	if e := r.notPickedError(router.ErrPanicked); e.Status != http.StatusInternalServerError || e.Code != "internal_error" ||
		e.RetryAfter != 0 {
		t.Errorf("got %+v, want a 500 without Retry-After", e)
	}
}
