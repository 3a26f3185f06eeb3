package proxy

import (
	"fmt"
	"net/http"
	"testing"
	"time"
)

// refusals are errors of full replicas, as events of each endpoint with streams.
var refusals = []struct{ name, path, event string }{
	{"vLLM", "/v1/chat/completions", `data: {"error": {"message": "The engine is currently busy and cannot accept new requests. Please try ` +
		`again later or on a different instance.", "type": "Service Unavailable", "param": null, "code": 503}}` + "\n\n" + doneLine},
	{"SGLang", "/v1/chat/completions", `data: {"error": {"object": "error", "message": "The request queue is full.", "type": ` +
		`"SERVICE_UNAVAILABLE", "param": null, "code": 503}}` + "\n\n" + doneLine},
	{"429", "/v1/chat/completions", `data: {"error": {"message": "The engine is currently busy and cannot accept new requests.", "type": ` +
		`"Too Many Requests", "param": null, "code": 429}}` + "\n\n" + doneLine},
	{"completions", "/v1/completions", `data: {"error": {"message": "full", "code": 503}}` + "\n\n" + doneLine},
	{"tokens", "/inference/v1/generate", `data: {"error": {"message": "full", "code": 503}}` + "\n\n" + doneLine},
	{"audio", "/v1/audio/transcriptions", `data: {"error": {"message": "full", "code": 503}}` + "\n\n" + doneLine},
	{"responses", "/v1/responses", streamedResponse("resp_1", "")[0] + "event: error\n" +
		`data: {"type":"error","code":"503","message":"full","param":null,"sequence_number":1}` + "\n\n"},
	{"Anthropic", "/v1/messages", "event: error\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":"full"}}` + "\n\n"},
	// vLLM 0.32 takes the error event of the chat that it serves /v1/messages with for a chunk that is invalid.
	{"vLLM's messages", "/v1/messages", "event: error\n" +
		`data: {"type":"error","error":{"type":"internal_error","message":"2 validation errors for ChatCompletionStreamResponse\nmodel\n  ` +
		`Field required [type=missing, input_value={'error': {'message': 'Th...am': None, 'code': 503}}, input_type=dict]\n    For further ` +
		`information visit https://errors.pydantic.dev/2.14/v/missing\nchoices\n  Field required [type=missing, input_value={'error': ` +
		`{'message': 'Th...am': None, 'code': 503}}, input_type=dict]\n    For further information visit ` +
		`https://errors.pydantic.dev/2.14/v/missing"}}` + "\n\n"},
}

// A request that a full replica refuses waits until a request there has ended, whether the refusal is a status or an event.
func TestQueueFullWaits(t *testing.T) {
	t.Parallel()
	type refusal struct{ name, path, says string }
	var all []refusal
	for _, c := range refusals {
		all = append(all, refusal{c.name, c.path, streamed(c.event)})
	}
	for _, path := range []string{"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/audio/transcriptions"} {
		all = append(all, refusal{"status 503", path, answered("503 Service Unavailable", `{"error":{"message":"full","code":503}}`)})
	}
	all = append(all, refusal{"status 429", "/v1/chat/completions",
		answered("429 Too Many Requests", `{"error":{"message":"The engine has reached its prefill token backlog limit. Please try again `+
			`later or on a different instance.","type":"Too Many Requests","param":null,"code":429}}`)})
	for _, c := range all {
		t.Run(c.name+" "+c.path, func(t *testing.T) {
			t.Parallel()
			refused, good := make(chan struct{}), "data: x\n\n"+doneLine
			for _, e := range endMarks {
				if e.path == c.path {
					good = e.content + e.marks[0]
				}
			}
			r := &replica{}
			r.script = func(s *session) {
				for {
					if _, ok := s.request(); !ok {
						return
					}
					switch len(r.requests()) {
					case 1: // makes the replica full
						s.say(sseHead, chunk(role+hello))
						<-refused
						s.say(chunk(stop+doneLine), lastChunk)
					case 2:
						close(refused)
						s.say(c.says)
					default:
						s.say(streamed(good))
					}
				}
			}
			suspected := make(chan string, 100)
			f := serveWithQueue(t, queueForAMinute, func(o *Options) { o.RecheckHealth = suspects(suspected) }, r)
			first := f.background(askStream)
			eventually(t, "the replica is full", func() bool { return len(r.requests()) == 1 })
			if got := f.askStreamAt(c.path); got != good {
				t.Errorf("got %q, want %q", got, good)
			}
			if a := <-first; a.status != http.StatusOK {
				t.Errorf("the first request got %+v", a)
			}
			if n := len(r.requests()); n != 3 {
				t.Errorf("the replica saw %d requests, want 3", n)
			}
		})
	}
}

// The error of a replica that takes no requests for now costs no attempt, whether it is a status or an event.
func TestUnavailableReplicaCostsNoAttempt(t *testing.T) {
	t.Parallel()
	const (
		shutdown = `{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,"code":500}}`
		draining = `{"error":{"message":"Server shutting down","type":"ServiceUnavailableError","param":null,"code":503}}`
		scaling  = `{"error": "The model is currently scaling. Please try again later."}`
		message  = `{"type":"error","error":{"type":"internal_error","message":"cannot schedule new futures after shutdown"}}`
	)
	for name, c := range map[string]struct{ path, says, reason string }{
		"shutdown":           {"/v1/chat/completions", answered("500 Internal Server Error", shutdown), "status_500"},
		"shutdown, 503":      {"/v1/chat/completions", answered("503 Service Unavailable", draining), "status_503"},
		"shutdown event":     {"/v1/chat/completions", streamed("data: "+shutdown+"\n\n", doneLine), "error_event"},
		"shutdown event 503": {"/v1/completions", streamed("data: "+draining+"\n\n", doneLine), "error_event"},
		"shutdown, message":  {"/v1/messages", streamed("event: error\ndata: " + message + "\n\n"), "error_event"},
		"shutdown, response": {"/v1/responses", streamed("data: "+shutdown+"\n\n", doneLine), "error_event"},
		"scaling":            {"/v1/chat/completions", answered("503 Service Unavailable", scaling), "scaling"},
		"scaling event":      {"/v1/chat/completions", streamed("data: "+scaling+"\n\n", doneLine), "scaling"},
		"scaling, message":   {"/v1/messages", streamed("data: " + scaling + "\n\n"), "scaling"},
		"scaling, response":  {"/v1/responses", streamed("data: " + scaling + "\n\n"), "scaling"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			good := ""
			for _, e := range endMarks {
				if e.path == c.path {
					good = e.content + e.marks[0]
				}
			}
			f := serve(t, func(o *Options) { o.Attempts = 1 }, &replica{script: always(c.says)}, &replica{script: always(streamed(good))})
			if got := f.askStreamAt(c.path); got != good {
				t.Errorf("got %q, want the second replica's", got)
			}
			f.awaitMetric(fmt.Sprintf(`warmroute_retries_total{reason=%q} 1`, c.reason))
		})
	}
}

// An error event after a keep-alive is that of the replica's status, and a full replica is waited for.
func TestQueueFullAfterKeepAlive(t *testing.T) {
	t.Parallel()
	const refusal = `{"error":{"message":"The engine is currently busy and cannot accept new requests.","type":"Too Many Requests",` +
		`"param":null,"code":429}}`
	heard := make(chan struct{})
	first := &replica{script: func(s *session) {
		s.request()
		s.until(heard)
		s.say(answered("429 Too Many Requests", refusal))
	}}
	f := serve(t, func(o *Options) { o.QueueKeepalive = 10 * time.Millisecond }, first, &replica{script: always(streamed(goodStream))})
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	close(heard)
	if got := r.rest(); r.resp.StatusCode != http.StatusOK || got != goodStream {
		t.Errorf("got %d %q", r.resp.StatusCode, got)
	}
}

// Errors of the request itself are relayed as they came, also as events.
func TestErrorEventsOfRequestRelayed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ path, events string }{
		"429":     {"/v1/chat/completions", `data: {"error":{"message":"slow down","type":"Too Many Requests","code":429}}` + "\n\n" + doneLine},
		"501":     {"/v1/chat/completions", `data: {"error":{"message":"m","code":501}}` + "\n\n" + doneLine},
		"message": {"/v1/messages", "event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"m"}}` + "\n\n"},
		"rate":    {"/v1/messages", "event: error\n" + `data: {"type":"error","error":{"type":"rate_limit_error","message":"m"}}` + "\n\n"},
		"response": {"/v1/responses", "event: error\n" + `data: {"type":"error","code":"invalid_prompt","message":"m","sequence_number":0}` +
			"\n\n"},
		"stored": {"/v1/responses/resp_1?stream=true", "event: error\n" +
			`data: {"type":"error","code":"503","message":"m","sequence_number":7}` + "\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &replica{script: always(streamed(c.events))}
			f := serve(t, withResponseIndex, r, &replica{script: always(streamed("data: x\n\n"))})
			if got := f.askStreamAt(c.path); got != c.events {
				t.Errorf("got %q", got)
			}
			if n := len(r.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}
