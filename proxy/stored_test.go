package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends"
	"warmroute/proxy/apikey"
	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/recovery"
	"warmroute/router"
	"warmroute/router/responseindex"
)

// responseStore is what a replica with VLLM_ENABLE_RESPONSES_API_STORE=1 keeps.
type responseStore struct {
	mu  sync.Mutex
	ids []string
}

func (s *responseStore) add(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids = append(s.ids, id)
}

func (s *responseStore) has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.ids, id)
}

func (s *responseStore) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids = nil
}

func responseObject(id, status string) string {
	return `{"id":"` + id + `","object":"response","status":"` + status +
		`","output":[{"type":"message","content":[{"type":"output_text","text":"Hello"}]}],"usage":{"input_tokens":12,"output_tokens":3}}`
}

// streamedResponse is a stream of /v1/responses, whose first event repeats some instructions.
func streamedResponse(id, instructions string) []string {
	return []string{
		"event: response.created\ndata: " + `{"response":{"id":"` + id + `","instructions":"` + instructions +
			`","usage":null},"sequence_number":0,"type":"response.created"}` + "\n\n",
		"event: response.output_text.delta\ndata: " + `{"delta":"Hello","sequence_number":1,"type":"response.output_text.delta"}` + "\n\n",
		"event: response.completed\ndata: " + `{"response":` + responseObject(id, "completed") +
			`,"sequence_number":2,"type":"response.completed"}` + "\n\n",
	}
}

// storing is a replica that keeps its responses, whose ids begin with its name unless the
// request names another. What keeps the store counts the ids.
func storing(name string, kept *responseStore) *replica {
	between := func(s, before, after string) string {
		_, s, _ = strings.Cut(s, before)
		s, _, _ = strings.Cut(s, after)
		return s
	}
	r := &replica{name: name}
	r.script = func(s *session) {
		for {
			req, ok := s.request()
			if !ok {
				return
			}
			missing := func(id string) string {
				return answered("404 Not Found", `{"error":{"message":"Response with id '`+id+
					`' not found.","type":"invalid_request_error","param":"response_id","code":404}}`)
			}
			id, cancels := strings.CutSuffix(strings.TrimPrefix(req.URL.Path, "/v1/responses/"), "/cancel")
			previous := between(req.body, `"previous_response_id":"`, `"`)
			switch {
			case req.URL.Path != "/v1/responses" && !kept.has(id):
				s.say(missing(id))
			case cancels:
				s.say(answered("400 Bad Request", `{"error":{"message":"Cannot cancel a synchronous response.","type":"invalid_request_error",`+
					`"param":"response_id","code":400}}`))
			case req.URL.Path != "/v1/responses" && req.URL.RawQuery == "stream=true&starting_after=0":
				s.say(streamed(streamedResponse(id, "")[1:]...))
			case req.URL.Path != "/v1/responses":
				s.say(answered("200 OK", responseObject(id, "cancelled")))
			case previous != "" && !kept.has(previous):
				s.say(missing(previous))
			default:
				if id = between(req.body, `"request_id":"`, `"`); id == "" {
					id = fmt.Sprintf("resp_%s_%d", name, len(r.requests()))
				}
				kept.add(id)
				object := responseObject(id, "completed")
				if previous != "" {
					object = strings.Replace(object, `"object"`, `"previous_response_id":"`+previous+`","object"`, 1)
				}
				if strings.Contains(req.body, `"stream":true`) {
					s.say(streamed(streamedResponse(id, strings.Repeat("x", 3*relay.MaxLineBytes/2*strings.Count(req.body, "long")))...))
				} else {
					s.say(answered("200 OK", object))
				}
			}
		}
	}
	return r
}

// storedFleet is a proxy in front of replicas a and b that keep their responses.
type storedFleet struct {
	*fleet
	replicas [2]*replica
	kept     [2]responseStore
	index    *responseindex.Index
}

// serveStored starts a storedFleet. A request goes to a if it may go to either.
func serveStored(t *testing.T, queue router.QueueSettings, keys ...apikey.Key) *storedFleet {
	f := &storedFleet{index: responseindex.New(responseindex.Settings{MaxEntries: 100, TTL: time.Hour}, time.Now, nil)}
	for i, name := range []string{"a", "b"} {
		f.replicas[i] = storing(name, &f.kept[i])
	}
	f.fleet = serveWithQueue(t, queue, func(o *Options) {
		o.Responses, o.Keys = f.index, apikey.New(keys)
	}, f.replicas[0], f.replicas[1])
	return f
}

// preferSecond has the second replica preferred from now on.
func (f *storedFleet) preferSecond() {
	for i, running := range []int{200, 0} {
		f.backends[i].SetLoad(&backends.Load{QueuesKnown: true, Running: running, PolledAt: time.Now()})
	}
}

// requestTo sends a request without a body, or with body, and returns the answer.
func (f *storedFleet) requestTo(method, path, body string, headers ...string) (status int, answer, backend string) {
	f.t.Helper()
	req, err := http.NewRequest(method, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.StatusCode, string(out), resp.Header.Get("X-Warmroute-Backend")
}

const askResponse = `{"model":"m","input":"hi"}`

func continuing(id string) string {
	return `{"model":"m","input":"and then?","previous_response_id":"` + id + `"}`
}

// seenRequests is how many requests the replicas have got.
func (f *storedFleet) seenRequests() int {
	return len(f.replicas[0].requests()) + len(f.replicas[1].requests())
}

// wantMissing checks that an answer is the API's 404 with a reason.
func wantMissing(t *testing.T, status int, answer, code, reason string) {
	t.Helper()
	if status != http.StatusNotFound || !strings.Contains(answer, `"type":"invalid_request_error"`) ||
		!strings.Contains(answer, `"code":"`+code+`"`) || !strings.Contains(answer, reason) {
		t.Errorf("status %d %s, want a 404 of %s that says %q", status, answer, code, reason)
	}
}

func TestStatefulResponse(t *testing.T) {
	for _, c := range []struct{ name, body string }{
		{"whole", askResponse},
		{"stream", `{"model":"m","input":"hi","stream":true}`},
		{"stream that begins with a long event", `{"model":"m","input":"long","stream":true}`},
		{"chosen id", `{"model":"m","input":"hi","request_id":"mine"}`},
		{"stream with a chosen id", `{"model":"m","input":"hi","stream":true,"request_id":"mine"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serveStored(t, router.QueueSettings{})
			if status, answer, backend := f.requestTo("POST", "/v1/responses", c.body); status != 200 || backend != "a" {
				t.Fatalf("status %d from %q: %.200s", status, backend, answer)
			}
			f.preferSecond()
			if _, _, backend := f.requestTo("POST", "/v1/responses", askResponse); backend != "b" {
				t.Fatalf("a new conversation goes to %q", backend)
			}
			id := f.kept[0].ids[0]
			if status, answer, backend := f.requestTo("POST", "/v1/responses", continuing(id)); status != 200 || backend != "a" {
				t.Errorf("the next turn: status %d from %q: %.200s", status, backend, answer)
			}
			if status, answer, backend := f.requestTo("GET", "/v1/responses/"+id, ""); status != 200 || backend != "a" ||
				answer != responseObject(id, "cancelled") {
				t.Errorf("GET: status %d from %q: %.200s", status, backend, answer)
			}
			if status, answer, backend := f.requestTo("GET", "/v1/responses/"+id+"?stream=true&starting_after=0", ""); status != 200 ||
				backend != "a" || answer != strings.Join(streamedResponse(id, "")[1:], "") {
				t.Errorf("GET of a stream: status %d from %q: %.200s", status, backend, answer)
			}
			if status, answer, backend := f.requestTo("POST", "/v1/responses/"+id+"/cancel", ""); status != 400 || backend != "a" ||
				!strings.Contains(answer, "synchronous") {
				t.Errorf("cancel: status %d from %q: %.200s", status, backend, answer)
			}
			f.awaitMetric(`warmroute_response_lookups_total{result="known"} 4`)
			f.awaitMetric(`warmroute_requests_total{backend="a",code="200",endpoint="/v1/responses/{response_id}",model=""} 2`)
		})
	}
}

func TestUnstoredResponseIsNotRemembered(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	for _, stream := range []string{"true", "false"} {
		f.requestTo("POST", "/v1/responses", `{"model":"m","input":"hi","store":false,"stream":`+stream+`}`)
	}
	if n := f.index.Len(); n != 0 {
		t.Errorf("%d responses are remembered", n)
	}
}

// Usage of a stored response was counted when it was made, and its status says nothing of the attempt.
func TestRetrievalIsNotCharged(t *testing.T) {
	f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil))
	f.requestTo("POST", "/v1/responses", askResponse, bearer("alice")...)
	for range 3 {
		if status, _, _ := f.requestTo("GET", "/v1/responses/"+f.kept[0].ids[0], "", bearer("alice")...); status != 200 {
			t.Fatalf("status %d", status)
		}
	}
	f.awaitMetric(`warmroute_key_prompt_tokens_total{key="alice"} 12`)
	f.awaitMetric(`warmroute_key_output_tokens_total{key="alice"} 3`)
}

func TestResponseOfAnotherKey(t *testing.T) {
	f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil), keyOf("bob", nil))
	f.requestTo("POST", "/v1/responses", askResponse, bearer("alice")...)
	id, before := f.kept[0].ids[0], f.seenRequests()
	for _, known := range []string{id, "resp_unknown", "resp;1"} {
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(known), bearer("bob")...)
		wantMissing(t, status, answer, "previous_response_not_found", "no replica is known to hold it")
		status, answer, _ = f.requestTo("GET", "/v1/responses/"+known, "", bearer("bob")...)
		wantMissing(t, status, answer, "response_not_found", "no replica is known to hold it")
		status, answer, _ = f.requestTo("POST", "/v1/responses/"+known+"/cancel", "", bearer("bob")...)
		wantMissing(t, status, answer, "response_not_found", "no replica is known to hold it")
	}
	if n := f.seenRequests(); n != before {
		t.Errorf("%d requests reached a replica", n-before)
	}
	f.awaitMetric(`warmroute_response_lookups_total{result="other_key"} 3`)
	if status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(id), bearer("alice")...); status != 200 {
		t.Errorf("its own key: status %d %s", status, answer)
	}
}

func TestSearchForUnknownResponse(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	f.kept[1].add("resp_old")
	if status, answer, backend := f.requestTo("POST", "/v1/responses", continuing("resp_old")); status != 200 || backend != "b" {
		t.Errorf("status %d from %q: %s", status, backend, answer)
	}
	f.awaitMetric(`warmroute_response_lookups_total{result="found"} 1`)
	before := f.seenRequests()
	f.requestTo("GET", "/v1/responses/resp_old", "")
	if n := f.seenRequests() - before; n != 1 {
		t.Errorf("%d requests for what was found before, want 1", n)
	}
	before = f.seenRequests()
	for range 3 {
		status, answer, _ := f.requestTo("GET", "/v1/responses/resp_none", "")
		wantMissing(t, status, answer, "response_not_found", "no replica is known to hold it")
	}
	if n := f.seenRequests() - before; n != 2 {
		t.Errorf("%d requests for what no replica has, want one each", n)
	}
	// What is not an id is asked of nobody.
	before = f.seenRequests()
	for _, id := range []string{"..", "a%20b", "a,b", strings.Repeat("x", 300)} {
		if status, answer, _ := f.requestTo("GET", "/v1/responses/"+id, ""); status != 404 {
			t.Errorf("%s: status %d %s", id, status, answer)
		}
	}
	if n := f.seenRequests() - before; n != 0 {
		t.Errorf("%d requests for what is no id", n)
	}
}

func TestSearchSkipsDownReplicas(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	f.backends[1].SetState(backends.Down)
	for want := 1; want <= 2; want++ { // nothing is known of the one that is down
		status, answer, _ := f.requestTo("GET", "/v1/responses/resp_none", "")
		wantMissing(t, status, answer, "response_not_found", "")
		if n := f.seenRequests(); n != want {
			t.Errorf("%d requests, want %d", n, want)
		}
	}
}

type panickingTransport struct{}

func (panickingTransport) RoundTrip(*http.Request) (*http.Response, error) { panic("broken") }

func (panickingTransport) Do(context.Context, *fasthttp.Request, *fasthttp.Response, func(io.Reader) error) error {
	panic("broken")
}

// A panic of a search ends neither the process nor the search on the other replicas.
func TestPanicOfSearch(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	f.kept[0].add("resp_1")
	holder := f.backends[0]
	u, err := backends.ParseURL("http://10.0.0.9:8000")
	if err != nil {
		t.Fatal(err)
	}
	broken := backends.New("broken", u, "", panickingTransport{})
	if _, err := backends.NewRegistry([]*backends.Backend{broken}); err != nil {
		t.Fatal(err)
	}
	broken.SetState(backends.Ready)
	reported := make(chan any, 2)
	report := func(_ recovery.Place, cause any, _ []byte) { reported <- cause }
	responses := stored.NewResponses(nil)
	found, all := responses.Search(t.Context(), report, "resp_1", []*backends.Backend{broken, holder}, "")
	if found != holder || all || <-reported != "broken" {
		t.Errorf("found %v, all responded: %v", found, all)
	}
}

func TestLostResponse(t *testing.T) {
	t.Parallel()
	const code = "previous_response_not_found"
	t.Run("restarted", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil))
		f.requestTo("POST", "/v1/responses", askResponse, bearer("alice")...)
		id := f.kept[0].ids[0]
		f.kept[0].clear()
		before := f.seenRequests()
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(id), bearer("alice")...)
		wantMissing(t, status, answer, code, "restarted")
		wantMissing(t, status, answer, code, "Send the whole conversation")
		status, answer, _ = f.requestTo("GET", "/v1/responses/"+id, "", bearer("alice")...)
		wantMissing(t, status, answer, "response_not_found", "no replica is known to hold it")
		if n := f.seenRequests() - before; n != 1 {
			t.Errorf("%d requests, want 1", n)
		}
		f.awaitMetric(`warmroute_response_lookups_total{result="lost"} 1`)
	})
	t.Run("gone", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, NoneReadyTimeout: failsafe, BusyTimeout: failsafe})
		f.requestTo("POST", "/v1/responses", askResponse)
		id, address := f.kept[0].ids[0], f.replicas[0].listener.Addr().String()
		f.replicas[0].stop()
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(id))
		wantMissing(t, status, answer, code, "has ended")
		f.replicas[0].startAt(t, address) // for the cleanup
	})
	t.Run("removed", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{})
		f.index.Add("resp_1", responseindex.Entry{Backend: "http://127.0.0.1:1"})
		before := f.seenRequests()
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing("resp_1"))
		wantMissing(t, status, answer, code, "removed")
		if f.seenRequests() != before {
			t.Error("a replica was asked")
		}
		f.awaitMetric(`warmroute_response_lookups_total{result="lost"} 1`)
	})
	t.Run("down for too long", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, NoneReadyTimeout: 50 * time.Millisecond,
			BusyTimeout: 50 * time.Millisecond})
		f.requestTo("POST", "/v1/responses", askResponse)
		f.backends[0].SetState(backends.Down)
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(f.kept[0].ids[0]))
		wantMissing(t, status, answer, code, "not ready")
	})
	t.Run("of another model", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{})
		f.requestTo("POST", "/v1/responses", askResponse)
		f.backends[1].SetModels(cards([]string{"m", "other"}))
		status, answer, _ := f.requestTo("POST", "/v1/responses", strings.Replace(continuing(f.kept[0].ids[0]), `"m"`, `"other"`, 1))
		wantMissing(t, status, answer, code, "does not serve the model")
	})
	t.Run("disabled", func(t *testing.T) {
		f := serveStored(t, router.QueueSettings{})
		f.index.Configure(responseindex.Settings{})
		f.requestTo("POST", "/v1/responses", askResponse)
		before := f.seenRequests()
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(f.kept[0].ids[0]))
		wantMissing(t, status, answer, code, "no replica is known to hold it")
		if f.seenRequests() != before {
			t.Error("a replica was asked")
		}
	})
}

// A draining replica answers for what it has, and gets no new work.
func TestStoredResponseOnDrainingReplica(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	f.requestTo("POST", "/v1/responses", askResponse)
	id := f.kept[0].ids[0]
	f.backends[0].SetState(backends.Draining)
	if status, answer, _ := f.requestTo("GET", "/v1/responses/"+id, ""); status != 200 {
		t.Errorf("GET: status %d %s", status, answer)
	}
	if status, answer, _ := f.requestTo("POST", "/v1/responses/"+id+"/cancel", ""); status != 400 {
		t.Errorf("cancel: status %d %s", status, answer)
	}
	status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(id))
	wantMissing(t, status, answer, "previous_response_not_found", "about to be removed")
	f.backends[0].SetState(backends.Ready)
	if status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(id)); status != 200 {
		t.Errorf("after the drain: status %d %s", status, answer)
	}
}

// A replica that fails does not make another one answer: it could not.
func TestStatefulResponseIsNotRetriedElsewhere(t *testing.T) {
	full, other := &replica{name: "full", script: always(answered("503 Service Unavailable", `{"error":{"message":"full"}}`))},
		&replica{script: always(answered("200 OK", whole))}
	index := responseindex.New(responseindex.Settings{MaxEntries: 1, TTL: time.Hour}, time.Now, nil)
	f := serve(t, func(o *Options) { o.Responses = index }, full, other)
	index.Add("resp_1", responseindex.Entry{Backend: backends.NormalizeURL(f.backends[0].URL)})
	resp, answer := f.post("/v1/responses", continuing("resp_1"))
	if resp.StatusCode != 503 || resp.Header.Get("X-Warmroute-Backend") != "full" || len(other.requests()) != 0 {
		t.Errorf("status %d: %s; the other replica has got %d requests", resp.StatusCode, answer, len(other.requests()))
	}
}

func TestStatefulResponseExplained(t *testing.T) {
	f := serveStored(t, router.QueueSettings{})
	f.index.Add("resp_1", responseindex.Entry{Backend: backends.NormalizeURL(f.backends[1].URL)})
	ask := func(id string) (*Explanation, error) {
		body := continuing(id)
		return f.proxy.Explain(DryRunRequest{Endpoint: "/v1/responses", Body: strings.NewReader(body), Length: int64(len(body))})
	}
	if e, err := ask("resp_1"); err != nil || e.Choice != "b" || e.Reason != router.ReasonStored || e.Backends[0].Filter != "stored" {
		t.Errorf("got %+v, %v", e, err)
	}
	if _, err := ask("resp_2"); err == nil || !strings.Contains(err.Error(), "not found") || f.seenRequests() != 0 {
		t.Errorf("an unknown response: %v; %d requests were sent", err, f.seenRequests())
	}
}
