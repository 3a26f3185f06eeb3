package sim

import (
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// messages answers POST /v1/messages, Anthropic's protocol, with text.
func (s *Server) messages(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.checkMessagesBody("messages", "model", "max_tokens")
	}
	var p params
	if err == nil {
		p, err = s.readParams(in, "max_tokens")
	}
	var text []byte
	if err == nil {
		text, err = s.renderChat(withSystem(systemText(in["system"]), in["messages"]))
	}
	var q *sequence
	if err == nil {
		q, err = s.sequence(p, tokenize(text, nil), 0, nil)
	}
	if err != nil {
		writeAnthropicError(w, err)
		return
	}
	s.generate(w, r, p.stream, []*sequence{q}, &messageFormat{params: p, server: s, sequence: q, id: "chatcmpl-" + id(r)})
}

// countTokens answers POST /v1/messages/count_tokens.
func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.checkMessagesBody("messages", "model")
	}
	if err == nil {
		_, err = s.resolve(in["model"].Str)
	}
	var text []byte
	if err == nil {
		text, err = s.renderChat(withSystem(systemText(in["system"]), in["messages"]))
	}
	if err != nil {
		writeAnthropicError(w, err)
		return
	}
	n := strconv.Itoa(len(tokenize(text, nil)))
	writeJSON(w, http.StatusOK, `{"input_tokens":`+n+`,"context_management":{"original_input_tokens":`+n+`}}`)
}

func (in fields) checkMessagesBody(required ...string) error {
	found := in.checkTypes()
	for _, key := range required {
		if !in.has(key) {
			found = append(found, in.missing(key))
		}
	}
	if len(found) > 0 {
		return validation(found...)
	}
	return nil
}

// systemText is the system prompt, which is a string or a list of text blocks.
func systemText(v gjson.Result) string {
	if v.Type == gjson.String {
		return v.Str
	}
	var parts []string
	for _, block := range v.Array() {
		parts = append(parts, block.Get("text").String())
	}
	return strings.Join(parts, "\n")
}

// writeAnthropicError gives an error that the serving layer found Anthropic's
// shape. What FastAPI finds before keeps OpenAI's.
func writeAnthropicError(w http.ResponseWriter, err error) {
	var e apiError
	if !errors.As(err, &e) || e.detail != "" || e.kind == "Bad Request" {
		writeError(w, err)
		return
	}
	b := append([]byte(`{"type":"error","error":{"type":"`+e.kind+`","message":`), quote(nil, e.message)...)
	writeJSON(w, e.status, append(b, "}}"...))
}

// messageFormat writes a message object, or the events that lead to it.
type messageFormat struct {
	params
	server   *Server
	sequence *sequence
	id       string

	block bool // the content block has begun
}

func event(b []byte, name, members string) []byte {
	return append(b, "event: "+name+"\ndata: {\"type\":\""+name+`"`+members+"}\n\n"...)
}

func (f *messageFormat) begin(b []byte) []byte { return b }

// open appends the event that begins a message. Its input_tokens are the whole
// prompt, cached or not: only the last message_delta tells them apart.
func (f *messageFormat) open(b []byte) []byte {
	return event(b, "message_start", `,"message":{"id":`+string(quote(nil, f.id))+`,"type":"message","role":"assistant","content":[],"model":`+
		string(quote(nil, f.model))+`,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":`+strconv.Itoa(f.sequence.Prompt)+`,"output_tokens":0}}`)
}

func (f *messageFormat) piece(b []byte, q *sequence, from, to int, _ reason) []byte {
	text := q.between(from, to)
	if text == "" {
		return b
	}
	if !f.block {
		f.block = true
		b = event(b, "content_block_start", `,"content_block":{"type":"text","text":""},"index":0`)
	}
	return event(b, "content_block_delta", `,"delta":{"type":"text_delta","text":`+string(quote(nil, text))+`},"index":0`)
}

func (f *messageFormat) close(b []byte) []byte {
	if f.block {
		b = event(b, "content_block_stop", `,"index":0`)
	}
	reason := f.stopReason()
	switch {
	case reason != "":
		reason = `"` + reason + `"`
	case f.block:
		reason = "null"
	default:
		reason = `"end_turn"` // what vLLM says where not even the chat below had a finish_reason
	}
	b = event(b, "message_delta", `,"delta":{"stop_reason":`+reason+`,"stop_sequence":null},"usage":`+f.usage())
	return event(b, "message_stop", "")
}

// stopReason is empty for an answer that was aborted.
func (f *messageFormat) stopReason() string {
	switch _, why := f.sequence.load(); why {
	case length:
		return "max_tokens"
	case aborted:
		return ""
	}
	return "end_turn"
}

func (f *messageFormat) usage() string {
	u := count([]*sequence{f.sequence}, 1)
	if f.server.cfg.NoTokenDetails {
		return `{"input_tokens":` + strconv.Itoa(u.prompt) + `,"output_tokens":` + strconv.Itoa(u.completion) + `}`
	}
	return `{"input_tokens":` + strconv.Itoa(u.prompt-u.cached-u.created) + `,"output_tokens":` + strconv.Itoa(u.completion) +
		`,"cache_creation_input_tokens":` + strconv.Itoa(u.created) + `,"cache_read_input_tokens":` + strconv.Itoa(u.cached) + `}`
}

func (f *messageFormat) fail(b []byte) []byte {
	return append(b, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"EngineCore encountered an issue. See stack trace (above) for the root cause.\"}}\n\n"...)
}

func (f *messageFormat) whole() []byte {
	tokens, _ := f.sequence.load()
	b := quote([]byte(`{"id":`), f.id)
	b = append(b, `,"type":"message","role":"assistant","content":[{"type":"text","text":`...)
	b = quote(b, f.sequence.between(0, tokens))
	b = quote(append(b, `}],"model":`...), f.model)
	if reason := f.stopReason(); reason != "" {
		b = append(b, `,"stop_reason":"`+reason+`"`...)
	}
	return append(b, `,"usage":`+f.usage()+`}`...)
}
