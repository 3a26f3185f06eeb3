//go:build !race

package e2e

import (
	"fmt"
	"slices"
	"strings"
)

// wireSubjects returns the subjects of the corpus.
func wireSubjects() []wireSubject {
	return slices.Concat(wireDialects(), wireRelaySubjects(), wireRequestSubjects(), wireCallSubjects())
}

// replies are what replicas do, by name.
type replies = map[string][]wireReply

// sends returns a reply that is sent as a whole.
func sends(data ...string) []wireReply { return []wireReply{{say(data...)}} }

var twoReplicas = []wireReplica{{name: "a"}, {name: "b"}}

// httpRequest returns a request with a body, if it has one, of that length.
func httpRequest(method, path, body string, headers ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: api.example.com\r\n", method, path)
	for _, h := range headers {
		b.WriteString(h + "\r\n")
	}
	if body != "" {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	return b.String() + "\r\n" + body
}

// post returns the steps of a client that sends a request.
func post(path, body string, headers ...string) []wireStep {
	return []wireStep{say(httpRequest("POST", path, body, headers...)), receive}
}

// request returns the steps of a client that sends a request without a body.
func request(method, path string, headers ...string) []wireStep {
	return []wireStep{say(httpRequest(method, path, "", headers...)), receive}
}

// httpResponse returns a whole response with a length.
func httpResponse(status, body string, headers ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %s\r\ndate: %s\r\nserver: uvicorn\r\ncontent-length: %d\r\n", status, wireDate, len(body))
	for _, h := range headers {
		b.WriteString(h + "\r\n")
	}
	return b.String() + "\r\n" + body
}

// jsonResponse is httpResponse for JSON.
func jsonResponse(status, body string, headers ...string) string {
	return httpResponse(status, body, append([]string{"content-type: application/json"}, headers...)...)
}

// streamHead is the head of a stream.
const streamHead = "HTTP/1.1 200 OK\r\ndate: " + wireDate + "\r\nserver: uvicorn\r\n" +
	"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"

func chunk(data string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(data), data) }

// streamOf returns a stream, one event a chunk.
func streamOf(events ...string) string {
	var b strings.Builder
	b.WriteString(streamHead)
	for _, e := range events {
		b.WriteString(chunk(e))
	}
	return b.String() + "0\r\n\r\n"
}

// chatEvent returns an event of a chat's stream.
func chatEvent(delta, finish string) string {
	return `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":` + delta +
		`,"finish_reason":` + finish + `}]}` + "\n\n"
}

// chatResponse returns a whole chat.
func chatResponse(content, finish string) string {
	return `{"id":"chatcmpl-1","object":"chat.completion","created":1764000000,"model":"m","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"` + content + `"},"finish_reason":"` + finish + `"}],` + chatTokens + `}`
}

const (
	chatPath       = "/v1/chat/completions"
	chatTokens     = `"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}`
	chatJSON       = `{"model":"m","messages":[{"role":"user","content":"Hello"}]}`
	chatStreamJSON = `{"model":"m","stream":true,"messages":[{"role":"user","content":"Hello"}]}`
	doneEvent      = "data: [DONE]\n\n"
)

var (
	chatWhole = chatResponse("Hi", "stop")
	chatRole  = chatEvent(`{"role":"assistant","content":""}`, "null")
	chatHello = chatEvent(`{"content":"Hello"}`, "null")
	chatWorld = chatEvent(`{"content":" world"}`, "null")
	chatStop  = chatEvent(`{}`, `"stop"`)
	chatUsage = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"m","choices":[],` + chatTokens + "}\n\n"
)

// wireAnswer is the reply to requests for which a case has none.
func wireAnswer(request []byte) string {
	if strings.Contains(string(request), `"stream":true`) {
		return streamOf(chatRole, chatHello, chatStop, doneEvent)
	}
	return jsonResponse("200 OK", chatWhole)
}
