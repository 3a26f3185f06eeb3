package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
)

// tooLongError is the error of vLLM 0.32 for a prompt beyond its context length.
const tooLongError = `{"error":{"message":"This model's maximum context length is 4096 tokens. However, your prompt contains at least ` +
	`4097 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. ` +
	`(parameter=input_tokens, value=4097)","type":"BadRequestError","param":"input_tokens","code":400}}`

// setContextLengths sets the context lengths of the backends; 0: it reports none.
func (f *fleet) setContextLengths(tokens ...int) {
	for slot, n := range tokens {
		list := cards([]string{"m", "fr<m"})
		list[0].MaxTokens = n
		f.backends[slot].SetModels(list)
	}
}

// serveLengths starts a Proxy in front of two replicas with these context lengths, of which it prefers the first. No
// request may be retried.
func serveLengths(t *testing.T, first, second func(*session), tokens ...int) (f *fleet, a, b *replica) {
	t.Helper()
	a, b = &replica{script: first}, &replica{script: second}
	f = serveWithQueue(t, queueForAMinute, func(o *Options) { o.Attempts, o.Retry = 1, RetrySettings{} }, a, b)
	f.setContextLengths(tokens...)
	return f, a, b
}

// lengthTestEndpoints are requests to endpoints of which a replica may refuse a prompt as too long.
var lengthTestEndpoints = map[string]string{
	"/v1/chat/completions":       askWhole,
	"/v1/completions":            `{"model":"m","prompt":"` + question + `"}`,
	"/v1/responses":              `{"model":"m","input":"` + question + `"}`,
	"/v1/messages":               `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"` + question + `"}]}`,
	"/v1/messages/count_tokens":  `{"model":"m","messages":[{"role":"user","content":"` + question + `"}]}`,
	"/inference/v1/generate":     `{"model":"m","token_ids":[` + strings.Repeat("7,", 200) + `7],"sampling_params":{}}`,
	"/v1/embeddings":             `{"model":"m","input":["` + question + `","a"]}`,
	"/pooling":                   `{"model":"m","input":"` + question + `"}`,
	"/v1/score":                  `{"model":"m","text_1":"` + question + `","text_2":"a"}`,
	"/v1/rerank":                 `{"model":"m","query":"` + question + `","documents":["a"]}`,
	"/v1/chat/completions?model": `{"model":"fr","messages":[{"role":"user","content":"` + question + `"}]}`, // an adapter
}

// TestRefusedAsTooLongTriesLongerReplica has no retry and one attempt: neither is used.
func TestRefusedAsTooLongTriesLongerReplica(t *testing.T) {
	refuses := always(answered("400 Bad Request", tooLongError))
	for endpoint, body := range lengthTestEndpoints {
		for _, longer := range []int{65536, 0} {
			t.Run(fmt.Sprint(endpoint, " ", longer), func(t *testing.T) {
				f, a, b := serveLengths(t, refuses, always(answered("200 OK", whole)), 4096, longer)
				breakAtOnce(t, f)
				resp, got := f.post(endpoint, body)
				if resp.StatusCode != http.StatusOK || got != whole {
					t.Fatalf("got %d %s", resp.StatusCode, got)
				}
				if len(a.requests()) != 1 || len(b.requests()) != 1 || b.requests()[0].body != body {
					t.Errorf("the replicas saw %d and %d requests", len(a.requests()), len(b.requests()))
				}
				f.awaitMetric(`warmroute_retries_total{reason="context_length"} 1`)
				if status := f.router.Status(f.backends[0]); status.Opens != 0 {
					t.Errorf("the shorter replica is %+v", status)
				}
			})
		}
	}
}

// TestModelListHasLongest checks that clients see the context length that requests may have.
func TestModelListHasLongest(t *testing.T) {
	f := serve(t, nil, &replica{}, &replica{}, &replica{})
	for slot, length := range []string{"4096", "65536", "16384"} {
		tokens, _ := strconv.Atoi(length)
		f.backends[slot].SetModels([]backends.Model{{ID: "m", MaxTokens: tokens, Card: []byte(`{"id":"m","max_model_len":` + length + `}`)}})
	}
	const card = `{"id":"m","max_model_len":65536}`
	for path, want := range map[string]string{"/v1/models": `{"object":"list","data":[` + card + `]}`, "/v1/models/m": card} {
		if _, got := f.get(path); got != want {
			t.Errorf("%s: got %s", path, got)
		}
	}
}

func TestRefusedAsTooLongInStream(t *testing.T) {
	event := "data: " + tooLongError + "\n\n"
	message := "event: error\ndata: " + `{"type":"error","error":{"type":"BadRequestError","message":"This model's maximum context length ` +
		`is 4096 tokens. However, you requested more."}}` + "\n\n"
	for name, c := range map[string]struct{ endpoint, body, refusal string }{
		"status": {"/v1/chat/completions", askStream, answered("400 Bad Request", tooLongError)},
		"event":  {"/v1/chat/completions", askStream, streamed(event, doneLine)},
		"message": {"/v1/messages", `{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"` + question + `"}]}`,
			streamed(message)},
	} {
		t.Run(name, func(t *testing.T) {
			f, _, b := serveLengths(t, always(c.refusal), always(streamed(role, hello, stop, doneLine)), 4096, 65536)
			if resp, got := f.post(c.endpoint, c.body); resp.StatusCode != http.StatusOK || got != role+hello+stop+doneLine {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			if len(b.requests()) != 1 {
				t.Errorf("the longer replica saw %d requests", len(b.requests()))
			}
			f.awaitMetric(`warmroute_retries_total{reason="context_length"} 1`)
		})
	}
}

// TestRefusedAsTooLongAfterKeepAlive has a client that has got the header of a stream.
func TestRefusedAsTooLongAfterKeepAlive(t *testing.T) {
	keepAliveRead := make(chan struct{})
	f := serveWithQueue(t, queueForAMinute, func(o *Options) {
		o.Attempts, o.QueueKeepalive = 1, 10*time.Millisecond
	}, &replica{script: func(s *session) {
		if _, ok := s.request(); ok {
			<-keepAliveRead
			s.say(answered("400 Bad Request", tooLongError))
		}
	}}, &replica{script: always(streamed(role, hello, stop, doneLine))})
	f.setContextLengths(4096, 65536)
	resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(askStream))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	close(keepAliveRead)
	if got, err := io.ReadAll(resp.Body); err != nil || !strings.HasSuffix(string(got), role+hello+stop+doneLine) {
		t.Errorf("got %s, %v", got, err)
	}
}

// TestRefusalAsTooLongIsRelayed checks that the client gets the replica's error, and no other replica the request.
func TestRefusalAsTooLongIsRelayed(t *testing.T) {
	truncated := `{"truncate_prompt_tokens":100,` + askWhole[1:]
	other := `{"error":{"message":"min_tokens must be less than or equal to max_tokens=5, got 9.","type":"BadRequestError","param":null,` +
		`"code":400}}`
	for name, c := range map[string]struct {
		endpoint, body string
		lengths        []int
		refusal        string
	}{
		"all of one length":    {"/v1/chat/completions", askWhole, []int{4096, 4096}, tooLongError},
		"no lengths":           {"/v1/chat/completions", askWhole, []int{0, 0}, tooLongError},
		"the other is longer?": {"/v1/chat/completions", askWhole, []int{0, 4096}, tooLongError},
		"another error":        {"/v1/chat/completions", askWhole, []int{4096, 65536}, other},
		"a truncated prompt":   {"/v1/chat/completions", truncated, []int{4096, 65536}, tooLongError},
		"truncated embeddings": {"/v1/embeddings", `{"model":"m","input":"a","truncate_prompt_tokens":5000}`, []int{4096, 65536}, tooLongError},
		"a truncated response": {"/v1/responses", `{"model":"m","input":"a","truncation":"auto"}`, []int{4096, 65536}, tooLongError},
	} {
		t.Run(name, func(t *testing.T) {
			f, _, b := serveLengths(t, always(answered("400 Bad Request", c.refusal)), always(answered("200 OK", whole)), c.lengths...)
			resp, got := f.post(c.endpoint, c.body)
			if resp.StatusCode != http.StatusBadRequest || got != c.refusal || len(b.requests()) != 0 {
				t.Errorf("got %d %s, and the other replica saw %d requests", resp.StatusCode, got, len(b.requests()))
			}
		})
	}
	t.Run("both refuse", func(t *testing.T) {
		second := strings.ReplaceAll(tooLongError, "4096", "65536")
		f, a, b := serveLengths(t, always(answered("400 Bad Request", tooLongError)), always(answered("400 Bad Request", second)), 4096, 65536)
		resp, got := f.post("/v1/chat/completions", askWhole)
		if resp.StatusCode != http.StatusBadRequest || got != second || len(a.requests()) != 1 || len(b.requests()) != 1 {
			t.Errorf("got %d %s, and the replicas saw %d and %d requests", resp.StatusCode, got, len(a.requests()), len(b.requests()))
		}
	})
}

// TestRefusedAsTooLongAwaitsLongerReplica checks that a request waits for a longer replica, before and after the refusal.
func TestRefusedAsTooLongAwaitsLongerReplica(t *testing.T) {
	for name, body := range map[string]string{
		"refused":          askWhole,
		"certainly longer": `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("a", 40*4096) + `"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			f, a, _ := serveLengths(t, always(answered("400 Bad Request", tooLongError)), always(answered("200 OK", whole)), 4096, 65536)
			f.backends[1].SetState(backends.Down)
			done := f.background(body)
			f.awaitQueued(1)
			f.backends[1].SetState(backends.Ready)
			f.router.BackendStateChanged(f.backends[1])
			if got := <-done; got.body != whole {
				t.Errorf("got %+v", got)
			}
			if n := len(a.requests()); name != "refused" && n != 0 {
				t.Errorf("the shorter replica saw %d requests", n)
			}
		})
	}
}

// TestLongerReplicaDies checks that a request waits for the next process of the only replica that it fits, beside another one
// that is ready.
func TestLongerReplicaDies(t *testing.T) {
	long := newMortal(dies)
	short := &replica{script: always(answered("400 Bad Request", tooLongError))}
	f := serveChecked(t, short, &long.replica)
	f.setContextLengths(4096, 65536)
	done := f.background(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("a", 40*4096) + `"}]}`)
	f.awaitQueued(1)
	f.revive(t, 1, always(answered("200 OK", whole)))
	if got := <-done; got.body != whole || len(short.requests()) != 0 {
		t.Errorf("got %+v, and the shorter replica saw %d requests", got, len(short.requests()))
	}
}

// TestRefusedAsTooLongPrefersLongest has three lengths: one more attempt is enough.
func TestRefusedAsTooLongPrefersLongest(t *testing.T) {
	middle := &replica{script: always(answered("400 Bad Request", tooLongError))}
	f := serveWithQueue(t, queueForAMinute, nil, &replica{script: always(answered("400 Bad Request", tooLongError))}, middle,
		&replica{script: always(answered("200 OK", whole))})
	f.setContextLengths(4096, 16384, 65536)
	if resp, got := f.post("/v1/chat/completions", askWhole); got != whole || len(middle.requests()) != 0 {
		t.Errorf("got %d %s, and the replica between them saw %d requests", resp.StatusCode, got, len(middle.requests()))
	}
}

// TestLongerReplicaFailsAfterRefusal checks that what the longer replica says counts more than the refusal.
func TestLongerReplicaFailsAfterRefusal(t *testing.T) {
	failure := `{"error":{"message":"no","type":"InternalServerError","param":null,"code":500}}`
	f, _, b := serveLengths(t, always(answered("400 Bad Request", tooLongError)), always(answered("500 Internal Server Error", failure)), 4096,
		65536)
	if resp, got := f.post("/v1/chat/completions", askWhole); resp.StatusCode != 500 || got != failure || len(b.requests()) != 1 {
		t.Errorf("got %d %s after %d requests", resp.StatusCode, got, len(b.requests()))
	}
}

// TestGrowingConversationMovesToLongerReplica has text of one byte for each token, where four are expected.
func TestGrowingConversationMovesToLongerReplica(t *testing.T) {
	const shortTokens = 4000
	responds := func(limit int, refused *atomic.Int64) func(*session) {
		return func(s *session) {
			for {
				r, ok := s.request()
				switch tokens := len(r.body); {
				case !ok:
					return
				case tokens > limit:
					refused.Add(1)
					s.say(answered("400 Bad Request", tooLongError))
				default:
					s.say(answered("200 OK", strings.Replace(whole, `"prompt_tokens":12`, `"prompt_tokens":`+strconv.Itoa(tokens), 1)))
				}
			}
		}
	}
	var refused, none atomic.Int64
	f, a, b := serveLengths(t, responds(shortTokens, &refused), responds(1<<20, &none), shortTokens, 1<<20)
	var messages []map[string]string
	for turn := range 30 {
		messages = append(messages, map[string]string{"role": "user", "content": fmt.Sprint(turn, " ", strings.Repeat("x", 400))})
		body, _ := json.Marshal(map[string]any{"model": "m", "max_tokens": 100, "messages": messages})
		if resp, got := f.post("/v1/chat/completions", string(body)); resp.StatusCode != http.StatusOK {
			t.Fatalf("turn %d: %d %s", turn, resp.StatusCode, got)
		}
		messages = append(messages, map[string]string{"role": "assistant", "content": "Hello"})
	}
	last := a.requests()
	if n := refused.Load(); n > 1 || len(last[len(last)-1].body) > shortTokens+500 {
		t.Errorf("%d turns were refused, the last on the shorter replica had %d bytes", n, len(last[len(last)-1].body))
	}
	if len(last)-int(refused.Load())+len(b.requests()) != 30 || len(last) < 4 {
		t.Errorf("the replicas saw %d and %d turns", len(last), len(b.requests()))
	}
}

// TestPrefillRequestRefusedAsTooLong checks that the request is served whole by a longer replica, and else that the client gets
// the error.
func TestPrefillRequestRefusedAsTooLong(t *testing.T) {
	for name, ask := range asks {
		for decodeLength, want := range map[int]string{65536: ask.want, 4096: tooLongError} {
			t.Run(fmt.Sprint(name, " ", decodeLength), func(t *testing.T) {
				p, d := &replica{script: always(answered("400 Bad Request", tooLongError))}, &replica{script: completes}
				f := serveSplit(t, nil, []*replica{p}, []*replica{d})
				f.setContextLengths(4096, decodeLength)
				if resp, got := f.post("/v1/chat/completions", ask.body); got != want {
					t.Errorf("got %d %s", resp.StatusCode, got)
				}
				if n := len(p.requests()); n != 1 {
					t.Errorf("%d prefill requests", n)
				}
			})
		}
	}
}

// TestDecodeRequestRefusedAsTooLong checks that a decode request which a replica refuses goes to one with a longer context.
func TestDecodeRequestRefusedAsTooLong(t *testing.T) {
	p, short, long := &replica{script: prefills()}, &replica{script: always(answered("400 Bad Request", tooLongError))},
		&replica{script: completes}
	f := serveSplit(t, nil, []*replica{p}, []*replica{short, long})
	f.setContextLengths(65536, 4096, 65536)
	if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
	if body := long.requests()[0].body; body != askWhole {
		t.Errorf("the longer replica got %s", body)
	}
}
