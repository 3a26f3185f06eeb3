package sim

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/tidwall/gjson"
)

// messages handles POST /v1/messages of Anthropic's API.
func (s *Server) messages(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.validateTypes("messages", "model", "max_tokens")
	}
	var p params
	if err == nil {
		p, err = s.readParams(in, "max_tokens")
	}
	p.session = sessionID(r, gjson.Result{}, in["vllm_xargs"])
	chat := chatOfMessages(in)
	var out *output
	if err == nil {
		out, err = s.demandedOrScripted(chat)
	}
	var text []byte
	if err == nil {
		text, err = s.renderChat(chat)
	}
	var q *sequence
	if err == nil {
		q, err = s.newSequence(p, s.tokenizer().tokenize(text, nil), 0, out)
	}
	if err != nil {
		s.releaseRefused(r, in)
		writeAnthropicError(w, err)
		return
	}
	s.generate(w, r, p.stream, []*sequence{q}, &messageFormat{params: p, server: s, sequence: q, id: "chatcmpl-" + requestID(r)})
}

// countTokens handles POST /v1/messages/count_tokens.
func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.validateTypes("messages", "model")
	}
	if err == nil {
		_, err = s.modelOrDefault(in["model"].Str)
	}
	var text []byte
	if err == nil {
		text, err = s.renderChat(chatOfMessages(in))
	}
	if err != nil {
		writeAnthropicError(w, err)
		return
	}
	n := strconv.Itoa(len(s.tokenizer().tokenize(text, nil)))
	writeJSON(w, http.StatusOK, `{"input_tokens":`+n+`,"context_management":{"original_input_tokens":`+n+`}}`)
}

// writeAnthropicError writes errors of the serving layer in Anthropic's form. Those of
// FastAPI have OpenAI's.
func writeAnthropicError(w http.ResponseWriter, err error) {
	var e apiError
	if !errors.As(err, &e) || e.detail != "" || e.kind == "Bad Request" {
		writeError(w, err)
		return
	}
	b := append([]byte(`{"type":"error","error":{"type":"`+e.kind+`","message":`), appendQuoted(nil, e.message)...)
	writeJSON(w, e.status, append(b, "}}"...))
}

// messageFormat writes a message object, or its events.
type messageFormat struct {
	params
	server   *Server
	sequence *sequence
	id       string

	blocks int    // content blocks begun
	open   string // type of the current one; "": none
}

func appendEvent(b []byte, name, members string) []byte {
	return append(b, "event: "+name+"\ndata: {\"type\":\""+name+`"`+members+"}\n\n"...)
}

func (f *messageFormat) appendBeforePrefill(b []byte) (unchanged []byte) { return b }

// appendBeforeFirstToken appends the event that begins a message. Its input_tokens include the
// cached ones, which only the last message_delta has separately.
func (f *messageFormat) appendBeforeFirstToken(b []byte) []byte {
	return appendEvent(b, "message_start", `,"message":{"id":`+string(appendQuoted(nil, f.id))+
		`,"type":"message","role":"assistant","content":[],"model":`+
		string(appendQuoted(nil, f.model))+`,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":`+strconv.Itoa(f.sequence.Prompt)+
		`,"output_tokens":0}}`)
}

func (f *messageFormat) appendTokens(b []byte, q *sequence, fromToken, toToken int, _ endReason) []byte {
	for _, p := range q.piecesBetween(fromToken, toToken) {
		delta := `{"type":"text_delta","text":`
		if p.call < 0 {
			if f.open != "text" {
				b = f.beginBlock(b, "text", `,"text":""`)
			}
		} else {
			if p.begins {
				call := q.calls[p.call]
				b = f.beginBlock(b, "tool_use", `,"id":"`+call.id+`","name":`+string(appendQuoted(nil, call.name))+`,"input":{}`)
			}
			delta = `{"type":"input_json_delta","partial_json":`
		}
		if p.text != "" {
			b = appendEvent(b, "content_block_delta", `,"delta":`+delta+string(appendQuoted(nil, p.text))+`},"index":`+strconv.Itoa(f.blocks-1))
		}
	}
	return b
}

// beginBlock ends the current content block and begins one of that type.
func (f *messageFormat) beginBlock(b []byte, kind, members string) []byte {
	b = f.endBlock(b)
	f.open = kind
	f.blocks++
	return appendEvent(b, "content_block_start", `,"content_block":{"type":"`+kind+`"`+members+`},"index":`+strconv.Itoa(f.blocks-1))
}

func (f *messageFormat) endBlock(b []byte) []byte {
	if f.open == "" {
		return b
	}
	f.open = ""
	return appendEvent(b, "content_block_stop", `,"index":`+strconv.Itoa(f.blocks-1))
}

func (f *messageFormat) appendStreamEnd(b []byte) []byte {
	b = f.endBlock(b)
	reason := f.stopReason()
	switch {
	case reason != "":
		reason = `"` + reason + `"`
	case f.blocks > 0:
		reason = "null"
	default:
		reason = `"end_turn"` // as vLLM does where the chat had no finish_reason
	}
	b = appendEvent(b, "message_delta", `,"delta":{"stop_reason":`+reason+`,"stop_sequence":null},"usage":`+f.usageJSON())
	return appendEvent(b, "message_stop", "")
}

// stopReason returns "" for an aborted message.
func (f *messageFormat) stopReason() string {
	switch _, end := f.sequence.loadProgress(); end {
	case lengthLimit:
		return "max_tokens"
	case aborted:
		return ""
	}
	if len(f.sequence.calls) > 0 {
		return "tool_use"
	}
	return "end_turn"
}

func (f *messageFormat) usageJSON() string {
	u := sumUsage([]*sequence{f.sequence}, 1)
	if f.server.cfg.NoTokenDetails {
		return `{"input_tokens":` + strconv.Itoa(u.prompt) + `,"output_tokens":` + strconv.Itoa(u.completion) + `}`
	}
	return `{"input_tokens":` + strconv.Itoa(max(0, u.prompt-u.cached-u.created)) + `,"output_tokens":` + strconv.Itoa(u.completion) +
		`,"cache_creation_input_tokens":` + strconv.Itoa(u.created) + `,"cache_read_input_tokens":` + strconv.Itoa(u.cached) + `}`
}

// appendFailure appends the error event that vLLM 0.32 makes of that of a chat, which it takes for an invalid chunk.
func (f *messageFormat) appendFailure(b []byte, e apiError) []byte {
	const link = "input_type=dict]\n    For further information visit https://errors.pydantic.dev/2.14/v/missing"
	invalid := fmt.Sprintf("Field required [type=missing, input_value={'error': {'message': '%.2s...am': None, 'code': %d}}, %s", e.message,
		e.status, link)
	message := "2 validation errors for ChatCompletionStreamResponse\nmodel\n  " + invalid + "\nchoices\n  " + invalid
	return appendEvent(b, "error", `,"error":{"type":"internal_error","message":`+string(appendQuoted(nil, message))+`}`)
}

func (f *messageFormat) fullResponse() []byte {
	q := f.sequence
	tokens, _ := q.loadProgress()
	b := appendQuoted([]byte(`{"id":`), f.id)
	b = append(b, `,"type":"message","role":"assistant","content":[`...)
	content, calls := q.contentBefore(tokens), q.callsBefore(tokens)
	separator := ""
	if content != "" || len(calls) == 0 {
		b = append(appendQuoted(append(b, `{"type":"text","text":`...), content), '}')
		separator = ","
	}
	for i, arguments := range calls {
		if !gjson.Valid(arguments) { // truncated
			arguments = "{}"
		}
		b = append(b, separator+`{"type":"tool_use","id":"`+q.calls[i].id+`","name":`...)
		b = append(appendQuoted(b, q.calls[i].name), `,"input":`+arguments+`}`...)
		separator = ","
	}
	b = appendQuoted(append(b, `],"model":`...), f.model)
	if reason := f.stopReason(); reason != "" {
		b = append(b, `,"stop_reason":"`+reason+`"`...)
	}
	b = append(b, `,"usage":`+f.usageJSON()...)
	if transfer := f.server.formatTransferParams([]*sequence{q}); transfer != "null" {
		b = append(b, `,"kv_transfer_params":`+transfer...)
	}
	return append(b, '}')
}
