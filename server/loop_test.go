package server

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/config"
)

// countedReplica is a stand-in that counts the chats it was sent.
func countedReplica(t *testing.T) (url string, chats *atomic.Int64) {
	chats = new(atomic.Int64)
	return standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		chats.Add(1)
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, wholeResponse)
	}}.start(t), chats
}

// addBackend adds a backend while the proxy runs, as a reload does.
func (f *fronted) addBackend(name, url string) {
	f.t.Helper()
	next := *f.server.started
	next.Backends = append(next.Backends[:len(next.Backends):len(next.Backends)], config.Backend{Name: name, URL: url})
	f.server.updateFleet(f.t, &next)
}

// requests is how many requests for inference the proxy has ended.
func (f *fronted) requests() int { return int(metricSum(f.t, f.admin, "warmroute_requests_total")) }

// askMany sends so many chats, each with a prompt of its own.
func (f *fronted) askMany(n int) {
	f.t.Helper()
	for i := range n {
		body := strings.Replace(plainChat, "hello", fmt.Sprint("hello ", i), 1)
		if resp, text, err := f.chat(body); err != nil || resp.StatusCode != http.StatusOK || text != wholeResponse {
			f.t.Fatalf("request %d: %v, %v, %.200q", i, resp, err, text)
		}
	}
}

// checkOften has backends checked so often that a change is seen soon.
func checkOften(c *config.Config) {
	c.Health.Interval, c.Health.DownInterval = 50*time.Millisecond, 50*time.Millisecond
}

func TestProxyAsItsOwnBackend(t *testing.T) {
	t.Parallel()
	url, chats := countedReplica(t)
	f := startFronted(t, checkOften, url)
	f.ready(1)
	f.addBackend("self", f.url)
	f.logs(`backend=self state=down reason="/health returned 508: the backend is this proxy itself (loop); remove it from the backends"`)
	f.askMany(60)
	if chats.Load() != 60 || f.requests() != 60 {
		t.Errorf("60 requests became %d at the proxy and %d at the replica", f.requests(), chats.Load())
	}
	f.ready(1)
}

func TestProxiesAsEachOthersBackends(t *testing.T) {
	t.Parallel()
	urlA, chatsA := countedReplica(t)
	urlB, chatsB := countedReplica(t)
	a, b := startFronted(t, checkOften, urlA), startFronted(t, checkOften, urlB)
	a.ready(1)
	b.ready(1)
	a.addBackend("b", b.url)
	b.addBackend("a", a.url)
	for name, f := range map[string]*fronted{"b": a, "a": b} {
		f.logs("backend=" + name + " state=down")
		f.logs("returned 508: the backend has this proxy among its own backends (loop); remove one of the two")
		f.ready(1)
	}
	a.askMany(30)
	b.askMany(30)
	if chatsA.Load() != 30 || chatsB.Load() != 30 || a.requests() != 30 || b.requests() != 30 {
		t.Errorf("30 requests each became %d and %d at the proxies, %d and %d at the replicas",
			a.requests(), b.requests(), chatsA.Load(), chatsB.Load())
	}
}

// The checks do not see a loop of three; requests pass each proxy once at most.
func TestLoopOfThreeProxies(t *testing.T) {
	t.Parallel()
	url, chats := countedReplica(t)
	c := startFronted(t, func(c *config.Config) {
		checkOften(c)
		c.Routing.Policy = "round-robin"
	}, url)
	c.ready(1)
	b := startFronted(t, checkOften, c.url)
	b.ready(1)
	a := startFronted(t, checkOften, b.url)
	a.ready(1)
	c.addBackend("a", a.url)
	c.ready(2)
	const requests = 20
	a.askMany(requests)
	if chats.Load() != requests {
		t.Errorf("the replica saw %d requests, want %d", chats.Load(), requests)
	}
	if n := a.requests(); n > 2*requests {
		t.Errorf("the first proxy saw %d requests: more than one loop each", n)
	}
	if n := c.requests(); n != requests {
		t.Errorf("the third proxy saw %d requests, want %d", n, requests)
	}
	if metricSum(t, c.admin, "warmroute_backend_breaker_opens_total") != 0 {
		t.Error("a loop opened a breaker")
	}
}

func TestProxyBehindProxy(t *testing.T) {
	t.Parallel()
	url, chats := countedReplica(t)
	inner := startFronted(t, nil, url)
	inner.ready(1)
	outer := startFronted(t, nil, inner.url, url)
	outer.ready(2)
	outer.askMany(20)
	if chats.Load() != 20 {
		t.Errorf("the replica saw %d requests, want 20", chats.Load())
	}
}
