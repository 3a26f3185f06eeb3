package proxy

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/proxy/activity"
	"warmroute/proxy/apikey"
	"warmroute/router/responseindex"
)

// backgroundStore is what a replica says of its one background response.
type backgroundStore struct {
	mu      sync.Mutex
	status  string // empty: it has lost the response
	usage   string
	cancels int
}

func (s *backgroundStore) set(status, usage string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.usage = status, usage
}

func (s *backgroundStore) countCancels() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cancels
}

// respond returns the response to a request, which is the latest status in all cases.
func (s *backgroundStore) respond(r seen) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case strings.HasSuffix(r.URL.Path, "/cancel"):
		s.cancels++
		s.status = "cancelled"
	case r.Method == http.MethodPost:
		s.status = "queued"
	case s.status == "":
		return answered("404 Not Found", `{"error":{"message":"Response with id 'resp_1' not found.","type":"invalid_request_error",`+
			`"param":"response_id","code":404}}`)
	}
	usage := s.usage
	if usage == "" {
		usage = "null"
	}
	return answered("200 OK", `{"id":"resp_1","object":"response","background":true,"status":"`+s.status+`","output":[],"usage":`+usage+`}`)
}

// serveBackground serves one replica whose responses are in store, and sends it a request of a key with limits.
func serveBackground(t *testing.T, store *backgroundStore) (*fleet, *replica, *apikey.Account) {
	t.Helper()
	r := &replica{script: func(s *session) {
		for {
			req, ok := s.request()
			if !ok {
				return
			}
			s.say(store.respond(req))
		}
	}}
	f := serve(t, func(o *Options) {
		o.Keys = apikey.New([]apikey.Key{keyOf("a", func(k *apikey.Key) { k.TokensPerMinute, k.Concurrency = 2000, 2 })})
		o.Responses = responseindex.New(responseindex.Settings{MaxEntries: 10, TTL: time.Hour}, time.Now, nil)
	}, r)
	f.backends[0].SetLoad(&backends.Load{StartTime: 1, PolledAt: time.Now()})
	if resp, body := f.post("/v1/responses", `{"model":"m","input":"x","background":true,"max_output_tokens":1900}`,
		bearer("a")...); resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %s", resp.StatusCode, body)
	}
	return f, r, f.proxy.keys.FindName("a")
}

// A background response counts for its key and its backend until it is complete, and costs what its usage says.
func TestBackgroundResponseCharged(t *testing.T) {
	t.Parallel()
	store := new(backgroundStore)
	f, r, account := serveBackground(t, store)
	if _, tokens := account.Rates(); tokens.Remaining > 600 {
		t.Errorf("%d tokens remain while 1900 may be generated", tokens.Remaining)
	}
	lease, refusal := account.TryAcquire() // the second place
	if refusal != nil {
		t.Fatal(refusal)
	}
	resp, _ := f.post("/v1/responses", `{"model":"m","input":"x"}`, bearer("a")...)
	lease.Release(0, 0)
	if n := f.backends[0].InFlight.Load(); resp.StatusCode != http.StatusTooManyRequests || n != 1 {
		t.Errorf("status %d for a second request, %d in flight at the backend", resp.StatusCode, n)
	}
	if listed := f.proxy.Activity().OldestRequests(1, 1); listed.Total != 1 || listed.Oldest[0].Backend != "r0" {
		t.Errorf("operators see %+v", listed)
	}
	store.set("in_progress", "")
	eventually(t, "the replica was asked", func() bool { return len(r.requests()) > 1 })
	store.set("completed", `{"input_tokens":10,"output_tokens":20,"total_tokens":30}`)
	f.awaitMetric(`warmroute_key_output_tokens_total{key="a"} 20`)
	f.awaitMetric(`warmroute_key_prompt_tokens_total{key="a"} 10`)
	f.awaitIdle()
	if _, tokens := account.Rates(); tokens.Remaining < 1900 {
		t.Errorf("%d tokens remain after 30", tokens.Remaining)
	}
	if resp, body := f.post("/v1/responses", `{"model":"m","input":"x"}`, bearer("a")...); resp.StatusCode != http.StatusOK {
		t.Errorf("status %d, %s", resp.StatusCode, body)
	}
	store.set("completed", "")
	f.awaitIdle()
}

// A background response that will not be completed is released.
func TestBackgroundResponseEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end     func(*fleet, *replica, *backgroundStore)
		cancels int
		free    bool // the key pays nothing
	}{
		"replica has lost it": {func(_ *fleet, _ *replica, s *backgroundStore) { s.set("", "") }, 0, true},
		"replica has ended": {func(_ *fleet, r *replica, _ *backgroundStore) {
			r.listener.Close()
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, c := range r.conns {
				c.Close()
			}
		}, 0, true},
		"replica has restarted": {func(f *fleet, _ *replica, _ *backgroundStore) {
			f.backends[0].SetLoad(&backends.Load{StartTime: 2, PolledAt: time.Now()})
		}, 0, true},
		"client cancels": {func(f *fleet, _ *replica, _ *backgroundStore) { f.requestCancel("resp_1") }, 1, false},
		"operator cancels": {func(f *fleet, _ *replica, _ *backgroundStore) {
			f.proxy.Activity().Cancel(f.only(activity.Responding).Handle)
		}, 1, false},
		"proxy ends": {func(f *fleet, _ *replica, _ *backgroundStore) { f.proxy.Close() }, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := new(backgroundStore)
			f, r, account := serveBackground(t, store)
			c.end(f, r, store)
			f.awaitIdle()
			eventually(t, "the replica was told", func() bool { return store.countCancels() == c.cancels })
			eventually(t, "nothing is in flight", func() bool { return f.proxy.Activity().OldestRequests(1, 1).Total == 0 })
			if c.free { // they would take longer than failsafe to come by themselves
				eventually(t, "the tokens are given back", func() bool {
					_, tokens := account.Rates()
					return tokens.Remaining >= 1990
				})
			}
		})
	}
}

// requestCancel sends the client's own cancel of a response.
func (f *fleet) requestCancel(id string) {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodPost, f.url+"/v1/responses/"+id+"/cancel", nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Authorization", bearer("a")[1])
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		f.t.Errorf("cancel: status %d", resp.StatusCode)
	}
}

// A background response goes on when the client of its stream disconnects, and costs what its usage says.
func TestBackgroundStreamAbandoned(t *testing.T) {
	t.Parallel()
	store := new(backgroundStore)
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) { k.TokensPerMinute = 2000 })), &replica{script: func(s *session) {
		req, ok := s.request()
		if !ok {
			return
		}
		if req.Method != http.MethodPost {
			s.say(store.respond(req))
			return
		}
		s.say(sseHead, chunk(`data: {"type":"response.created","response":{"id":"resp_1","background":true,"status":"in_progress"}}`+"\n\n"),
			chunk(`data: {"type":"response.output_text.delta","delta":"x"}`+"\n\n"))
		s.closed()
	}})
	store.set("in_progress", "")
	ctx, disconnect := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/responses",
		strings.NewReader(`{"model":"m","input":"x","background":true,"stream":true,"max_output_tokens":1900}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", bearer("a")[1])
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	disconnect()
	resp.Body.Close()
	eventually(t, "all that may be generated is charged", func() bool {
		_, tokens := f.proxy.keys.FindName("a").Rates()
		return tokens.Remaining < 600
	})
	if n := f.backends[0].InFlight.Load(); n != 1 {
		t.Errorf("%d in flight at the backend", n)
	}
	store.set("completed", `{"input_tokens":10,"output_tokens":20,"total_tokens":30}`)
	f.awaitMetric(`warmroute_key_output_tokens_total{key="a"} 20`)
	f.awaitIdle()
}

// All responses of one server share its polls.
func TestBackgroundPollsShared(t *testing.T) {
	b := newBackgroundResponses()
	first, again, other := b.acquire("a"), b.acquire("a"), b.acquire("b")
	if first != again || first == other || first.Limit() != rate.Every(time.Second) || first.Burst() != 1 {
		t.Errorf("limiters %p, %p of one server, %p of another: %v at once %d", first, again, other, first.Limit(), first.Burst())
	}
	for _, address := range []string{"a", "b", "a"} {
		b.release(address)
	}
	if len(b.servers) != 0 {
		t.Errorf("left: %s", fmt.Sprint(b.servers))
	}
}
