package proxy

import (
	"fmt"
	"strings"
)

// What replicas in tests say, in vLLM's bytes.
const (
	sseHead   = "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 05:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	sseToEnd  = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
	lastChunk = "0\r\n\r\n"

	role     = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	hello    = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	world    = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	stop     = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop"}]}` + "\n\n"
	abort    = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"abort"}]}` + "\n\n"
	counted  = `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"
	doneLine = "data: [DONE]\n\n"
	dead     = `data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"
	tooLong  = `data: {"error": {"message": "This model's maximum context length is 8 tokens.", "type": "BadRequestError", "param": null, "code": 400}}` + "\n\n"

	whole      = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}`
	wholeAbort = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"abort"}],"usage":{"prompt_tokens":12,"total_tokens":12,"completion_tokens":0}}`
)

// What clients in tests say. The prompts are a few blocks long.
var (
	question       = strings.Repeat("What do you make of this? ", 40)
	askWhole       = `{"model":"m","messages":[{"role":"user","content":"` + question + `"}]}`
	askStream      = `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + question + `"}]}`
	questionBlocks = 4

	goodStream = role + hello + world + stop + counted + doneLine
)

// chunk is one chunk of a chunked body.
func chunk(data string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(data), data) }

// streamed is a whole streamed answer, one event a chunk.
func streamed(events ...string) string {
	var b strings.Builder
	b.WriteString(sseHead)
	for _, e := range events {
		b.WriteString(chunk(e))
	}
	return b.String() + lastChunk
}

// answered is a whole answer with a length.
func answered(status, body string, headers ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n", status, len(body))
	for _, h := range headers {
		b.WriteString(h + "\r\n")
	}
	return b.String() + "\r\n" + body
}
