package proxy

import (
	"strings"

	"warmroute/router/prompt"
)

// endpoint is one path that the proxy passes on to replicas. There is no other
// way through: what is not listed here is a 404, because a replica also serves
// paths that no client should reach.
type endpoint struct {
	path    string
	kind    prompt.Kind
	format  format
	form    bool // a multipart upload, not JSON
	instant bool // answered by the replica's server, without its engine
}

// format is the shape of an endpoint's answers, as far as the relay looks into them.
type format int

const (
	plainFormat format = iota // nothing to look for
	chatFormat
	completionFormat
	responsesFormat
	messagesFormat
)

// hasChoices reports whether an answer is a list of choices, each of which says why
// it ended, and a stream of them ends with [DONE].
func (f format) hasChoices() bool { return f == chatFormat || f == completionFormat }

// anthropic reports whether Anthropic's clients ask here, which send their key in a
// header of its own, and read errors of another shape.
func (e *endpoint) anthropic() bool { return isAnthropicPath(e.path) }

func isAnthropicPath(path string) bool {
	return path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/")
}

var endpoints = []endpoint{
	{path: "/v1/chat/completions", kind: prompt.Chat, format: chatFormat},
	{path: "/v1/completions", kind: prompt.Completion, format: completionFormat},
	{path: "/v1/responses", kind: prompt.Other, format: responsesFormat},
	{path: "/v1/messages", kind: prompt.Other, format: messagesFormat},
	{path: "/v1/messages/count_tokens", kind: prompt.Other, instant: true},
	{path: "/v1/embeddings", kind: prompt.Other},
	{path: "/pooling", kind: prompt.Other},
	{path: "/classify", kind: prompt.Other},
	{path: "/score", kind: prompt.Other},
	{path: "/v1/score", kind: prompt.Other},
	{path: "/rerank", kind: prompt.Other},
	{path: "/v1/rerank", kind: prompt.Other},
	{path: "/v2/rerank", kind: prompt.Other},
	{path: "/tokenize", kind: prompt.Other, instant: true},
	{path: "/detokenize", kind: prompt.Other, instant: true},
	{path: "/v1/audio/transcriptions", form: true, format: plainFormat},
	{path: "/v1/audio/translations", form: true, format: plainFormat},
}
