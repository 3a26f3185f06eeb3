package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// golden is the body of an answer recorded from vLLM 0.32.
func golden(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("../sim/testdata/vllm-0.32", name+".http"))
	if err != nil {
		t.Fatal(err)
	}
	_, answer, _ := bytes.Cut(raw, []byte("\n=== answer ===\n"))
	_, body, ok := bytes.Cut(answer, []byte("\r\n\r\n"))
	if !ok {
		t.Fatalf("no answer in %s", name)
	}
	return string(body)
}

// apis are the endpoints whose answers say how they ended.
var apis = []struct{ name, path, ask string }{
	{"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hi"}]`},
	{"completions", "/v1/completions", `{"model":"m","prompt":"Hi"`},
	{"responses", "/v1/responses", `{"model":"m","input":"Hi"`},
	{"messages", "/v1/messages", `{"model":"m","max_tokens":100,"messages":[{"role":"user","content":"Hi"}]`},
}

// streamOf sends body to an endpoint and returns the stream that comes back.
func (f *fleet) streamOf(path, body string, headers ...string) *bufio.Reader {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodPost, f.url+path, strings.NewReader(body))
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
	f.t.Cleanup(func() { resp.Body.Close() })
	return bufio.NewReader(resp.Body)
}

// sayEach says each part in a chunk of its own, and ends the body.
func (s *session) sayEach(parts []string) {
	for _, p := range parts {
		if p != "" {
			s.say(chunk(p))
		}
	}
	s.say(lastChunk)
}

// cancelled makes of an aborted response what vLLM makes of one of gpt-oss. That of
// any other model says that it is completed.
func cancelled(body string) string {
	return strings.Replace(body, `"status":"completed","text"`, `"status":"cancelled","text"`, 1)
}

// abortedStream is a recorded stream that was aborted after content, with three of
// its pieces of content left.
func abortedStream(t *testing.T, api string) (events []string) {
	t.Helper()
	pieces := 0
	for _, e := range strings.SplitAfter(golden(t, "abort-"+api+"-stream"), "\n\n") {
		if isContent(e) {
			if pieces++; pieces > 3 {
				continue
			}
		}
		if e != "" {
			events = append(events, cancelled(e))
		}
	}
	return events
}

func TestAbortedAnswerIsTriedElsewhere(t *testing.T) {
	type answer struct {
		name   string
		stream bool
		says   string
	}
	for _, api := range apis {
		stream, whole := golden(t, api.name+"-stream"), golden(t, api.name)
		early := golden(t, "abort-early-"+api.name+"-stream")
		answers := []answer{
			{"stream, before its first token", true, streamed(early)},
			{"stream, event by event", true, streamed(strings.SplitAfter(early, "\n\n")...)},
			{"whole, before its first token", false, answered("200 OK", golden(t, "abort-early-"+api.name))},
			{"whole", false, answered("200 OK", cancelled(golden(t, "abort-"+api.name)))},
		}
		switch api.name {
		case "chat", "completions":
			usage := strings.SplitAfter(early, "\n\n")
			answers = append(answers, answer{"stream without usage, before its first token", true, streamed(append(usage[:len(usage)-3], doneLine)...)})
			fallthrough
		case "messages": // a response's end alone is more than is read at once
			answers = append(answers, answer{"stream, in one packet with its content", true, streamed(strings.Join(abortedStream(t, api.name), ""))})
		}
		for _, c := range answers {
			t.Run(api.name+", "+c.name, func(t *testing.T) {
				ask, want, good := api.ask+"}", whole, answered("200 OK", whole)
				if c.stream {
					ask, want, good = api.ask+`,"stream":true}`, stream, streamed(stream)
				}
				f := serve(t, nil, &replica{script: always(c.says)}, &replica{script: always(good)})
				resp, answer := f.post(api.path, ask)
				if resp.StatusCode != http.StatusOK || answer != want || resp.Header.Get("X-Warmroute-Backend") != "r1" {
					t.Errorf("got %d from %q: %q, want the second replica's %q", resp.StatusCode, resp.Header.Get("X-Warmroute-Backend"), answer, want)
				}
				f.counts(`warmroute_retries_total{reason="aborted"} 1`)
				f.counts(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
				f.counts(`warmroute_backend_aborted_responses_total{backend="r1"} 0`)
			})
		}
	}
}

func TestStreamAbortedAfterContentEndsWithAnErrorEvent(t *testing.T) {
	for _, api := range apis {
		events := abortedStream(t, api.name)
		// What follows is not passed on: the abort itself, which no SDK takes for an
		// error, or the event that would end the stream well.
		last := map[string]string{"chat": `"finish_reason":"abort"`, "completions": `"finish_reason":"abort"`, "responses": "event: response.completed", "messages": "event: message_stop"}[api.name]
		n := slices.IndexFunc(events, func(e string) bool { return strings.Contains(e, last) })
		all, passed := strings.Join(events, ""), strings.Join(events[:n], "")
		head := strings.Join(events[:slices.IndexFunc(events, isContent)+1], "")
		for name, send := range map[string]func(*session, string){
			"in one packet":  func(s *session, rest string) { s.say(chunk(rest), lastChunk) },
			"event by event": func(s *session, rest string) { s.sayEach(strings.SplitAfter(rest, "\n\n")) },
			"line by line":   func(s *session, rest string) { s.sayEach(strings.SplitAfter(rest, "\n")) },
			"broken off":     func(s *session, rest string) { s.say(chunk(rest)) },
		} {
			t.Run(api.name+", "+name, func(t *testing.T) {
				relayed, suspected := make(chan struct{}), make(chan string, 1)
				other := &replica{script: always(streamed(golden(t, api.name+"-stream")))}
				f := serve(t, func(o *Options) { o.Suspect = suspects(suspected) }, &replica{script: func(s *session) {
					s.request()
					s.say(sseHead, chunk(head))
					<-relayed
					send(s, all[len(head):])
				}}, other)
				br := f.streamOf(api.path, api.ask+`,"stream":true}`, "X-Request-Id", "mine")
				f.expect(br, head)
				close(relayed)
				f.expect(br, passed[len(head):])
				rest, err := io.ReadAll(br)
				if err != nil {
					t.Fatalf("the stream has no proper end: %v", err)
				}
				endsWithError(t, api.name, string(rest), "replica_aborted")
				if len(other.requests()) != 0 {
					t.Error("a committed request was sent to another backend")
				}
				if <-suspected != "r0" {
					t.Error("the backend was not suspected")
				}
				f.counts(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
				f.counts(`warmroute_requests_total{backend="r0",code="502",endpoint="` + api.path + `",model="m"} 1`)
				f.settled()
				if logged := f.log.String(); strings.Count(logged, "aborted the request") != 1 || !strings.Contains(logged, "backend=r0") || !strings.Contains(logged, "request_id=mine") {
					t.Errorf("logged:\n%s", logged)
				}
			})
		}
	}
}

func isContent(event string) bool {
	for _, name := range []string{"event: content_block_delta", "event: response.output_text.delta"} {
		if strings.HasPrefix(event, name) {
			return true
		}
	}
	return strings.Contains(event, `"finish_reason":null`) && !strings.Contains(event, `"role"`)
}

// endsWithError checks that what is left of a stream is the API's error event.
func endsWithError(t *testing.T, api, rest, code string) {
	t.Helper()
	got := parse(t, rest)
	want := 1
	if api == "chat" || api == "completions" {
		want = 2
		if len(got) == 2 && got[1].data != "[DONE]" {
			t.Errorf("ends with %q", got[1])
		}
	}
	if len(got) != want {
		t.Fatalf("ends with %q, want an error event", got)
	}
	e := got[0]
	switch api {
	case "messages":
		if e.name != "error" || !strings.HasPrefix(e.data, `{"type":"error","error":{`) {
			t.Errorf("ends with %q", e)
		}
		return // Anthropic's errors have no code
	case "responses":
		if e.name != "error" || !strings.Contains(e.data, `"type":"error"`) {
			t.Errorf("ends with %q", e)
		}
	default:
		if e.name != "" || !strings.HasPrefix(e.data, `{"error":{`) {
			t.Errorf("ends with %q", e)
		}
	}
	if !strings.Contains(e.data, `"code":"`+code+`"`) {
		t.Errorf("ends with %q, want code %s", e, code)
	}
}

// A response that is longer than what is read at once has been passed on when its
// status comes, which stands at its end.
func TestLongCancelledResponseIsFollowedByAnErrorEvent(t *testing.T) {
	for _, size := range []int{2 * chunkBytes, 2 * longestLine} {
		events := abortedStream(t, "responses")
		n := len(events) - 1
		events[n] = strings.Replace(events[n], `"text":"`, `"text":"`+strings.Repeat("x", size), 1)
		f := serve(t, nil, &replica{script: always(streamed(events...))})
		_, answer := f.post("/v1/responses", apis[2].ask+`,"stream":true}`)
		all := strings.Join(events, "")
		rest, ok := strings.CutPrefix(answer, all)
		if !ok {
			t.Fatalf("got %.200q", answer)
		}
		endsWithError(t, "responses", rest, "replica_aborted")
		f.counts(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
	}
}

// The engine's account of an aborted answer is charged, though it is not passed on.
func TestAbortedStreamIsCharged(t *testing.T) {
	for _, api := range apis {
		events := abortedStream(t, api.name)
		relayed := make(chan struct{})
		f := serve(t, withKeys(keyOf("a", nil)), &replica{script: func(s *session) {
			s.request()
			n := slices.IndexFunc(events, isContent) + 1
			s.say(sseHead, chunk(strings.Join(events[:n], "")))
			<-relayed
			s.sayEach(events[n:])
		}})
		br := f.streamOf(api.path, api.ask+`,"stream":true}`, bearer("a")...)
		f.expect(br, events[0])
		close(relayed)
		io.Copy(io.Discard, br)
		usage := golden(t, "abort-"+api.name+"-stream")
		usage = usage[strings.LastIndex(usage, `"usage":`)+len(`"usage":`):]
		var u struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Input      int `json:"input_tokens"`
			Output     int `json:"output_tokens"`
			Read       int `json:"cache_read_input_tokens"`
			Created    int `json:"cache_creation_input_tokens"`
		}
		if err := json.NewDecoder(strings.NewReader(usage)).Decode(&u); err != nil {
			t.Fatal(err)
		}
		f.counts(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key="a"} %d`, u.Prompt+u.Input+u.Read+u.Created))
		f.counts(fmt.Sprintf(`warmroute_key_completion_tokens_total{key="a"} %d`, u.Completion+u.Output))
	}
}

// That the word stands in what was said, or in an event's other members, is no abort.
func TestWordAbortIsNoAbort(t *testing.T) {
	for path, stream := range map[string]string{
		"/v1/chat/completions": role + hello + strings.Replace(world, `"content":" world"`, `"content":"abort","refusal":"abort"`, 1) + stop + doneLine,
		"/v1/messages":         messagesBegin(`{"input_tokens":4,"output_tokens":0}`) + messagesContent + messagesEnd(`"end_turn"`, `{"output_tokens":4}`),
	} {
		f := serve(t, nil, &replica{script: always(streamed(stream))})
		if _, got := f.post(path, `{"model":"m","stream":true,"messages":[]}`); got != stream {
			t.Errorf("%s: got %q", path, got)
		}
		f.counts(`warmroute_backend_aborted_responses_total{backend="r0"} 0`)
	}
}

// An answer that is empty because the model ended its turn at once is an answer.
func TestEmptyAnswerIsNoAbort(t *testing.T) {
	empty := messagesBegin(`{"input_tokens":4,"output_tokens":0}`)
	_, end, _ := strings.Cut(messagesEnd(`"end_turn"`, `{"input_tokens":4,"output_tokens":1}`), "\n\n")
	empty += end
	early := golden(t, "abort-early-responses-stream")
	response := strings.Replace(early, `"output_tokens":0`, `"output_tokens":1`, 1)
	for _, c := range []struct{ path, says, want string }{
		{"/v1/messages", streamed(empty), empty},
		{"/v1/responses", streamed(response), response},
		{"/v1/chat/completions", streamed(role, stop, doneLine), role + stop + doneLine},
	} {
		f := serve(t, nil, &replica{script: always(c.says)})
		if _, got := f.post(c.path, `{"model":"m","stream":true,"input":"x","messages":[]}`); got != c.want {
			t.Errorf("%s: got %q", c.path, got)
		}
		f.counts(`warmroute_backend_aborted_responses_total{backend="r0"} 0`)
	}
}

func TestStreamBrokenOffAtItsConnectionsEnd(t *testing.T) {
	for _, api := range apis {
		whole := golden(t, api.name+"-stream")
		events := strings.SplitAfter(strings.TrimSuffix(whole, "\n\n"), "\n\n")
		content := slices.IndexFunc(events, isContent) + 1
		long := strings.Replace(whole, `"text":"`, `"text":"`+strings.Repeat("x", 2*longestLine), -1)
		dead := map[string]string{
			"messages":  "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"dead\"}}\n\n",
			"responses": "event: error\ndata: {\"code\":\"x\",\"message\":\"dead\",\"sequence_number\":9,\"type\":\"error\"}\n\n",
		}[api.name]
		cases := []struct {
			name, says string
			passed     string // of what is said; all of it: no error event follows
		}{
			{"after its last event", whole, whole},
			{"after its last event, which is long", long, long},
			{"before its last event", strings.Join(events[:len(events)-1], ""), strings.Join(events[:len(events)-1], "")},
			{"after content", strings.Join(events[:content], ""), strings.Join(events[:content], "")},
			{"in an event", strings.Join(events[:content], "") + events[content][:30], strings.Join(events[:content], "")},
		}
		for _, c := range cases {
			t.Run(api.name+", "+c.name, func(t *testing.T) {
				f := serve(t, nil, &replica{script: once(sseToEnd, c.says)})
				_, answer := f.post(api.path, api.ask+`,"stream":true}`)
				rest, ok := strings.CutPrefix(answer, c.passed)
				switch {
				case !ok:
					t.Errorf("got %.300q, want %.300q", answer, c.passed)
				case c.passed == whole || c.passed == long:
					if rest != "" {
						t.Errorf("followed by %q", rest)
					}
				default:
					endsWithError(t, api.name, rest, "replica_failed")
				}
			})
		}
		if dead != "" {
			t.Run(api.name+", after an error event", func(t *testing.T) {
				says := strings.Join(events[:content], "") + dead
				f := serve(t, nil, &replica{script: once(sseToEnd, says)})
				if _, answer := f.post(api.path, api.ask+`,"stream":true}`); answer != says {
					t.Errorf("got %q", answer)
				}
				f.counts(`warmroute_requests_total{backend="r0",code="500",endpoint="` + api.path + `",model="m"} 1`)
			})
		}
		t.Run(api.name+", before content", func(t *testing.T) {
			first := strings.Join(events[:content-1], "")
			f := serve(t, nil, &replica{script: once(sseToEnd, first)}, &replica{script: always(streamed(whole))})
			if _, answer := f.post(api.path, api.ask+`,"stream":true}`); answer != whole {
				t.Errorf("got %q, want the second replica's", answer)
			}
		})
	}
}
