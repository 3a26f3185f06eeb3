package proxy

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/proxy/apikey"
	"warmroute/router"
)

// statusOf asks for a path by GET and by HEAD, which must have one status, with an API key unless it is empty.
func (f *fleet) statusOf(path, key string) (status int, header http.Header, body string) {
	f.t.Helper()
	for _, method := range []string{http.MethodHead, http.MethodGet} {
		req, err := http.NewRequest(method, f.url+path, nil)
		if err != nil {
			f.t.Fatal(err)
		}
		if key != "" {
			req.Header.Set("Authorization", bearer(key)[1])
		}
		resp, err := f.client.Do(req)
		if err != nil {
			f.t.Fatal(err)
		}
		var text strings.Builder
		resp.Write(&text)
		resp.Body.Close()
		if status != 0 && resp.StatusCode != status {
			f.t.Errorf("%s: HEAD is answered with %d and GET with %d", path, status, resp.StatusCode)
		}
		status, header, body = resp.StatusCode, resp.Header, text.String()
	}
	return status, header, body
}

func TestReadyzOfModel(t *testing.T) {
	f := serve(t, nil, &replica{models: []string{"a", "lora<a"}}, &replica{models: []string{"b"}}, &replica{models: []string{"a", "org/c"}})
	expect := func(what string, want map[string]int) {
		t.Helper()
		for path, status := range want {
			got, header, body := f.statusOf(path, "")
			if got != status {
				t.Errorf("%s: %s is answered with %d, want %d: %s", what, path, got, status, body)
			}
			if path != "/readyz" && header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: %s has no JSON body: %s", what, path, body)
			}
			if after, _ := strconv.Atoi(header.Get("Retry-After")); (after > 0) != (status == http.StatusServiceUnavailable) {
				t.Errorf("%s: %s has Retry-After %q", what, path, header.Get("Retry-After"))
			}
		}
	}
	expect("all are ready", map[string]int{
		"/readyz": 200, "/readyz?model=a": 200, "/readyz?model=lora": 200, "/readyz?model=b": 200, "/readyz?model=org/c": 200,
		"/readyz?model=org%2Fc": 200,
		"/health?model=b":       200, "/readyz?model=none": 404, "/readyz?model=": 400, "/readyz?model=a&model=b": 400,
	})
	f.backends[1].SetState(backends.Down)
	f.backends[2].SetState(backends.Draining)
	expect("one of a is ready", map[string]int{"/readyz": 200, "/readyz?model=a": 200, "/readyz?model=b": 503, "/readyz?model=org/c": 503,
		"/readyz?model=none": 404})
	f.backends[0].SetLoad(&backends.Load{Asleep: true})
	f.backends[1].SetState(backends.Ready)
	expect("the last of a sleeps", map[string]int{"/readyz": 200, "/readyz?model=a": 503, "/readyz?model=lora": 503, "/readyz?model=b": 200})
	f.backends[1].SetModels(nil)
	expect("nobody lists b any more", map[string]int{"/readyz?model=b": 404})
}

func TestReadyzOfModelNeedsKey(t *testing.T) {
	f := serve(t, withKeys(keyOf("all", nil), keyOf("one", func(k *apikey.Key) { k.Models = []string{"b"} })),
		&replica{models: []string{"a"}}, &replica{models: []string{"b"}})
	f.backends[1].SetState(backends.Down)
	for _, c := range []struct {
		key, model string
		status     int
	}{
		{"", "a", 401}, {"", "none", 401}, {"unknown", "b", 401},
		{"all", "a", 200}, {"all", "b", 503}, {"all", "none", 404},
		{"one", "a", 404}, {"one", "b", 503}, {"one", "none", 404},
	} {
		if status, _, body := f.statusOf("/readyz?model="+c.model, c.key); status != c.status {
			t.Errorf("key %q asks for %s: %d, want %d: %s", c.key, c.model, status, c.status, body)
		}
	}
	if status, _, _ := f.statusOf("/readyz", ""); status != 200 {
		t.Errorf("/readyz without a key: %d", status)
	}
}

func TestModelReadinessMetrics(t *testing.T) {
	f := serve(t, nil, &replica{models: []string{"a", "lora<a"}}, &replica{models: []string{"b"}}, &replica{models: []string{"a"}})
	f.backends[1].SetState(backends.Down)
	f.awaitMetric(`warmroute_model_backends{model="a"} 2`)
	f.awaitMetric(`warmroute_model_ready_backends{model="a"} 2`)
	f.awaitMetric(`warmroute_model_ready_backends{model="lora"} 1`)
	f.awaitMetric(`warmroute_model_backends{model="b"} 1`)
	f.awaitMetric(`warmroute_model_ready_backends{model="b"} 0`)
	f.backends[2].SetState(backends.Draining)
	f.awaitMetric(`warmroute_model_ready_backends{model="a"} 1`)
	f.backends[1].SetModels(cards([]string{"a"}))
	if text := f.exposition(); strings.Contains(text, `warmroute_model_backends{model="b"}`) ||
		strings.Contains(text, `warmroute_model_ready_backends{model="b"}`) {
		t.Error("a model that nobody lists any more has series")
	}
}

// A full queue of requests for a model whose only replica is down refuses none for another model.
func TestQueueOfUnreadyModelDoesNotRefuseOthers(t *testing.T) {
	f := serveWithQueue(t, router.QueueSettings{Requests: 4, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}, nil,
		&replica{models: []string{"a"}, script: always(answered("200 OK", whole))},
		&replica{models: []string{"b"}, script: always(answered("200 OK", whole))})
	f.backends[0].SetState(backends.Down)
	chatOf := func(model string) string { return strings.Replace(askWhole, `"m"`, `"`+model+`"`, 1) }
	waiting := []<-chan answer{f.background(chatOf("a")), f.background(chatOf("a"))}
	f.awaitQueued(2)
	if a := <-f.background(chatOf("a")); a.status != http.StatusTooManyRequests || !strings.Contains(a.body, "queue_full") {
		t.Errorf("one more than may wait got %+v", a)
	}
	if a := <-f.background(chatOf("b")); a.status != http.StatusOK {
		t.Errorf("the other model's request got %+v", a)
	}
	f.backends[0].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[0])
	for _, done := range waiting {
		if a := <-done; a.status != http.StatusOK {
			t.Errorf("after the recovery one that waited got %+v", a)
		}
	}
}

func TestRetryAfterOfUnreadyModel(t *testing.T) {
	for _, c := range []struct {
		outage, untilCheck time.Duration
		least, most        int
	}{
		{0, 0, 1, 1},
		{3 * time.Second, 0, 2, 2},
		{3 * time.Second, 5 * time.Second, 5, 6},
		{20 * time.Second, time.Second, 10, 12},
		{80 * time.Second, time.Second, 40, 50},
		{time.Hour, time.Second, 48, 60},
		{time.Hour, time.Hour, 48, 60},
	} {
		for range 100 {
			if got := outageRetryAfter(c.outage, c.untilCheck); got < c.least || got > c.most {
				t.Fatalf("%v without a ready replica, next check in %v: Retry-After %d, want %d to %d", c.outage, c.untilCheck, got, c.least, c.most)
			}
		}
	}
	f := serve(t, nil, &replica{})
	f.backends[0].SetState(backends.Down)
	f.backends[0].RecordNextCheck(time.Now().Add(30 * time.Second))
	for _, path := range []string{"/readyz", "/readyz?model=m"} {
		_, header, _ := f.statusOf(path, "")
		if after, err := strconv.Atoi(header.Get("Retry-After")); err != nil || after < 25 || after > 60 {
			t.Errorf("GET %s: Retry-After %q though nothing is looked at for 30 s", path, header.Get("Retry-After"))
		}
	}
	resp, text := f.post("/v1/chat/completions", askWhole)
	if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); resp.StatusCode != http.StatusServiceUnavailable || err != nil ||
		after < 25 || after > 60 {
		t.Errorf("a request: %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), text)
	}
}
