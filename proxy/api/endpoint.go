// Package api has the paths of the public listener: the endpoints of OpenAI's and Anthropic's APIs that replicas serve,
// the formats of their
// responses, and the table in which a request finds its own.
package api

import (
	"cmp"
	"net/http"
	"strings"

	"warmroute/backends"
	"warmroute/prompt"
)

// Endpoint is a path whose requests go to replicas. No other path is relayed: a replica also serves some that no client should reach.
type Endpoint struct {
	Path       string // a pattern
	PromptKind prompt.Kind
	Format     Format
	Multipart  bool   // the body is multipart, not JSON
	NoEngine   bool   // the replica responds without its engine
	method     string // empty: POST
	IsExtra    bool   // of proxy.Settings.ExtraPaths

	Number backends.Endpoint // by which backends know it; unique
}

// ResponseIDPart stands in a path for the id of a stored response, which every request is about.
const ResponseIDPart = "{response_id}"

// IsAboutResponse reports whether the requests of an endpoint are about a stored response.
func (e *Endpoint) IsAboutResponse() bool { return strings.Contains(e.Path, ResponseIDPart) }

// ReadsRequestID reports whether a replica reads request_id in the body, by which some name their responses.
func (e *Endpoint) ReadsRequestID() bool {
	return !e.Multipart && !e.NoEngine && !e.IsExtra && e.PromptKind != prompt.Messages
}

// AllowedMethod returns the method of its requests.
func (e *Endpoint) AllowedMethod() string { return cmp.Or(e.method, http.MethodPost) }

// Format is the format of an endpoint's responses, as far as the relay reads them.
type Format int

const (
	PlainFormat Format = iota // not read
	ChatFormat
	CompletionFormat
	TokensFormat // of /inference/v1/generate
	ResponsesFormat
	MessagesFormat
	StoredFormat // a stored response, whose usage was counted when it was made: only its errors are written as in ResponsesFormat
)

// IsRead reports whether the relay reads what a response says.
func (f Format) IsRead() bool { return f != PlainFormat && f != StoredFormat }

// HasChoices reports whether a response is a list of choices with a finish_reason, and a stream of them ends with [DONE].
func (f Format) HasChoices() bool {
	return f == ChatFormat || f == CompletionFormat || f == TokensFormat
}

// Dialect is the API whose clients use an endpoint. Anthropic's read errors of another shape.
type Dialect int

const (
	OpenAI Dialect = iota
	Anthropic
)

// Dialect returns the API whose clients use the endpoint.
func (e *Endpoint) Dialect() Dialect { return DialectOf(e.Path) }

// DialectOf is Endpoint.Dialect for a path, served or not.
func DialectOf(path string) Dialect {
	if path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/") {
		return Anthropic
	}
	return OpenAI
}

// Endpoints are those that every proxy serves.
var Endpoints = numberEndpoints(
	Endpoint{Path: "/v1/chat/completions", PromptKind: prompt.Chat, Format: ChatFormat},
	Endpoint{Path: "/v1/completions", PromptKind: prompt.Completion, Format: CompletionFormat},
	Endpoint{Path: "/v1/responses", PromptKind: prompt.Responses, Format: ResponsesFormat},
	Endpoint{Path: "/v1/messages", PromptKind: prompt.Messages, Format: MessagesFormat},
	Endpoint{Path: "/inference/v1/generate", PromptKind: prompt.Generate, Format: TokensFormat},
	Endpoint{Path: "/v1/messages/count_tokens", PromptKind: prompt.Other, NoEngine: true},
	Endpoint{Path: "/v1/embeddings", PromptKind: prompt.Other},
	Endpoint{Path: "/pooling", PromptKind: prompt.Other},
	Endpoint{Path: "/classify", PromptKind: prompt.Other},
	Endpoint{Path: "/score", PromptKind: prompt.Other},
	Endpoint{Path: "/v1/score", PromptKind: prompt.Other},
	Endpoint{Path: "/rerank", PromptKind: prompt.Other},
	Endpoint{Path: "/v1/rerank", PromptKind: prompt.Other},
	Endpoint{Path: "/v2/rerank", PromptKind: prompt.Other},
	Endpoint{Path: "/tokenize", PromptKind: prompt.Other, NoEngine: true},
	Endpoint{Path: "/detokenize", PromptKind: prompt.Other, NoEngine: true},
	Endpoint{Path: "/v1/audio/transcriptions", Multipart: true, Format: PlainFormat},
	Endpoint{Path: "/v1/audio/translations", Multipart: true, Format: PlainFormat},

	// About one stored response, which only the replica that made it has.
	Endpoint{Path: "/v1/responses/" + ResponseIDPart, method: http.MethodGet, Format: StoredFormat, NoEngine: true},
	Endpoint{Path: "/v1/responses/" + ResponseIDPart + "/cancel", Format: StoredFormat, NoEngine: true},
)

// numberEndpoints numbers the endpoints of a list by their places in it.
func numberEndpoints(list ...Endpoint) []Endpoint {
	for i := range list {
		list[i].Number = backends.Endpoint(i)
	}
	return list
}

// TakesJSON reports whether a request creates a response from a JSON body.
func (e *Endpoint) TakesJSON() bool { return !e.Multipart && !e.IsAboutResponse() }
