package sim

import (
	"bytes"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

func (s *Server) chatCompletions(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err != nil {
		writeError(w, err)
		return
	}
	p, prompt, call, err := s.readChat(in)
	if err != nil {
		writeError(w, err)
		return
	}
	f := &chatFormat{server: s, params: p, id: "chatcmpl-" + id(r), created: time.Now().Unix(), call: call}
	var forced []byte
	if call != nil {
		forced = call.text
	}
	for i := range p.n {
		q, err := s.sequence(p, prompt, i, forced)
		if err != nil {
			writeError(w, err)
			return
		}
		f.sequences = append(f.sequences, q)
	}
	s.generate(w, r, p.stream, f.sequences, f)
}

// readChat checks a chat request in vLLM's order and renders its prompt.
func (s *Server) readChat(in fields) (p params, prompt []uint32, call *toolCall, err error) {
	found := in.checkTypes()
	switch m := in["messages"]; {
	case m.Raw == "":
		found = append(found, in.missing("messages"))
	case !m.IsArray():
		found = append(found, invalid{kind: "list_type", at: "body.messages", message: "Input should be a valid list", input: repr(m)})
	default:
		found = append(found, checkMessages(m)...)
	}
	if len(found) > 0 {
		return p, nil, nil, validation(found...)
	}
	if call, err = readToolChoice(in); err != nil {
		return p, nil, nil, err
	}
	if p, err = s.readParams(in, "max_completion_tokens", "max_tokens"); err != nil {
		return p, nil, nil, err
	}
	text, err := s.renderChat(in)
	if err != nil {
		return p, nil, nil, err
	}
	return p, tokenize(text, nil), call, nil
}

// renderChat is the chat template: leading system message, tools, turns, and
// the start of the assistant's turn.
func (s *Server) renderChat(in fields) ([]byte, error) {
	messages := in["messages"].Array()
	if len(messages) == 0 {
		return nil, badRequest("", "Cannot apply chat template to an empty conversation. Provide at least one message.")
	}
	var b bytes.Buffer
	b.Grow(len(in["messages"].Raw) + 64)
	if role := messages[0].Get("role").Str; role == "system" || role == "developer" {
		if err := s.renderTurn(&b, "system", messages[0]); err != nil {
			return nil, err
		}
		messages = messages[1:]
	}
	if tools := in["tools"].Array(); len(tools) > 0 && in["tool_choice"].Str != "none" {
		b.WriteString("<|im_start|>tools")
		for _, tool := range tools {
			b.WriteByte('\n')
			b.WriteString(tool.Get("@ugly").Raw)
		}
		b.WriteString("\nAnswer with <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call> to use one.<|im_end|>\n")
	}
	for _, m := range messages {
		if err := s.renderTurn(&b, m.Get("role").Str, m); err != nil {
			return nil, err
		}
	}
	if g := in["add_generation_prompt"]; g.Type != gjson.False {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.Bytes(), nil
}

func (s *Server) renderTurn(b *bytes.Buffer, role string, m gjson.Result) error {
	b.WriteString("<|im_start|>" + role + "\n")
	switch c := m.Get("content"); {
	case c.Type == gjson.String:
		if loneSurrogate(c.Raw) {
			return badRequest("", "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]")
		}
		b.WriteString(c.Str)
	case c.IsArray():
		for i, part := range c.Array() {
			if !part.Get("text").Exists() {
				return badRequest("", s.cfg.Model+" is not a multimodal model")
			}
			if i > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(part.Get("text").String())
		}
	}
	for _, call := range m.Get("tool_calls").Array() {
		arguments := call.Get("function.arguments")
		text := arguments.Str
		if arguments.IsObject() {
			text = arguments.Raw
		}
		b.WriteString(toolCallText(call.Get("function.name").Str, text))
	}
	b.WriteString("<|im_end|>\n")
	return nil
}

// chatFormat writes chat.completion and chat.completion.chunk objects.
type chatFormat struct {
	params
	server    *Server
	id        string
	created   int64
	call      *toolCall // what every choice answers with, or nil
	sequences []*sequence

	head []byte // what every chunk starts with, made once
}

const fingerprint = `"vllm-0.32.0-simulated"`

func (f *chatFormat) chunk(b []byte) []byte {
	if f.head == nil {
		f.head = quote([]byte(`data: {"id":`), f.id)
		f.head = append(f.head, `,"object":"chat.completion.chunk","created":`...)
		f.head = strconv.AppendInt(f.head, f.created, 10)
		f.head = quote(append(f.head, `,"model":`...), f.model)
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(b, f.head...)
}

func (f *chatFormat) begin(b []byte) []byte { return b }

func (f *chatFormat) open(b []byte) []byte {
	for _, q := range f.sequences {
		b = append(f.chunk(b), `{"index":`...)
		b = strconv.AppendInt(b, int64(q.index), 10)
		b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		b = f.running(b, q, 0)
		b = append(b, `,"prompt_token_ids":null,"prompt_text":null}`+"\n\n"...)
	}
	return b
}

func (f *chatFormat) piece(b []byte, q *sequence, from, to int, why reason) []byte {
	if f.call != nil {
		return f.call.pieces(b, f, q, from, to, why)
	}
	b = append(f.choice(b, q), '{')
	if text := q.between(from, to); text != "" { // the end of a turn is a token without text
		b = quote(append(b, `"content":`...), text)
	}
	return f.choiceEnd(append(b, '}'), q, to, why.String())
}

// choice begins a chunk up to its delta.
func (f *chatFormat) choice(b []byte, q *sequence) []byte {
	b = append(f.chunk(b), `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	return append(b, `,"delta":`...)
}

// choiceEnd ends a chunk after its delta; finish is empty while the choice goes on.
func (f *chatFormat) choiceEnd(b []byte, q *sequence, tokens int, finish string) []byte {
	b = append(b, `,"logprobs":null,"finish_reason":`...)
	if finish == "" {
		b = append(b, `null,"token_ids":null}]`...)
	} else {
		b = append(b, `"`+finish+`","stop_reason":null,"token_ids":null}]`...)
		if !f.includeUsage { // else it stands in the chunk with the usage
			b = append(b, `,"system_fingerprint":`+fingerprint...)
		}
	}
	b = f.running(b, q, tokens)
	return append(b, "}\n\n"...)
}

// running appends the usage so far where the client wants it in every chunk.
func (f *chatFormat) running(b []byte, q *sequence, tokens int) []byte {
	if !f.continuousUsage {
		return b
	}
	return f.server.appendUsage(append(b, `,"usage":`...), usage{prompt: q.Prompt, completion: tokens}, usageRunning)
}

func (f *chatFormat) close(b []byte) []byte {
	if f.includeUsage {
		b = append(f.chunk(b), `],"usage":`...)
		b = f.server.appendUsage(b, count(f.sequences, f.n), usageChatStream)
		b = append(b, `,"system_fingerprint":`+fingerprint+"}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (f *chatFormat) fail(b []byte) []byte { return append(b, engineDeadEvent...) }

func (f *chatFormat) whole() []byte {
	b := quote([]byte(`{"id":`), f.id)
	b = append(b, `,"object":"chat.completion","created":`...)
	b = strconv.AppendInt(b, f.created, 10)
	b = quote(append(b, `,"model":`...), f.model)
	b = append(b, `,"choices":[`...)
	for i, q := range f.sequences {
		if i > 0 {
			b = append(b, ',')
		}
		b = f.message(b, q)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`+fingerprint+`,"usage":`...)
	b = f.server.appendUsage(b, count(f.sequences, f.n), usageChat)
	return append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

func (f *chatFormat) message(b []byte, q *sequence) []byte {
	tokens, why := q.load()
	finish, content := why.String(), q.between(0, tokens)
	var calls []byte
	if f.call != nil {
		calls, content, finish = f.call.message(q, tokens, why)
	}
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	b = quote(append(b, `,"message":{"role":"assistant","content":`...), content)
	b = append(b, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
	b = append(b, calls...)
	return append(b, `,"reasoning":null},"logprobs":null,"finish_reason":"`+finish+`","stop_reason":null,"token_ids":null,"routed_experts":null}`...)
}
