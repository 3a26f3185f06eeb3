package sim

import (
	"bytes"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"
)

func (s *Server) chatCompletions(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err != nil {
		writeError(w, err)
		return
	}
	p, prompt, out, err := s.readChat(in)
	if err != nil {
		s.refuse(w, r, in, err)
		return
	}
	p.session = sessionID(r, in["session_id"], in["vllm_xargs"])
	f := &chatFormat{server: s, params: p, id: "chatcmpl-" + requestID(r), created: time.Now().Unix()}
	for i := range p.n {
		q, err := s.newSequence(p, prompt, i, out)
		if err != nil {
			s.refuse(w, r, in, err)
			return
		}
		f.sequences = append(f.sequences, q)
	}
	s.generate(w, r, p.stream, f.sequences, f)
}

// readChat checks a chat request in vLLM's order and returns its prompt, and its output
// unless that is generated.
func (s *Server) readChat(in fields) (p params, prompt []uint32, out *output, err error) {
	if err = in.validateTypes("messages"); err == nil {
		err = in.validateMessages()
	}
	if err != nil {
		return p, nil, nil, err
	}
	if out, err = s.demandedOrScripted(in); err != nil {
		return p, nil, nil, err
	}
	if p, err = s.readParams(in, "max_completion_tokens", "max_tokens"); err != nil {
		return p, nil, nil, err
	}
	text, err := s.renderChat(in)
	if err != nil {
		return p, nil, nil, err
	}
	return p, s.tokenizer().tokenize(text, nil), out, nil
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
		if hasLoneSurrogate(c.Raw) {
			return badRequest("", "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]")
		}
		b.WriteString(c.Str)
	case c.IsArray():
		for i, part := range c.Array() {
			if i > 0 {
				b.WriteByte('\n')
			}
			if text := part.Get("text"); text.Exists() {
				b.WriteString(text.String())
			} else if s.cfg.MediaTokens > 0 {
				s.renderMedia(b, part)
			} else {
				return badRequest("", s.cfg.Model+" is not a multimodal model")
			}
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

// renderMedia writes the tokens of a media item: its hash, repeated. An item with a uuid is
// identified by that.
func (s *Server) renderMedia(b *bytes.Buffer, part gjson.Result) {
	identity := part.Raw
	if uuid := part.Get("uuid"); uuid.Type == gjson.String {
		identity = uuid.Str
	}
	hash := strconv.FormatUint(xxh3.HashString(identity)|1<<63, 16) // 16 characters
	size := s.cfg.MediaTokens * s.cfg.BytesPerToken
	b.WriteString(strings.Repeat(hash, size/len(hash)+1)[:size])
}

// chatFormat writes chat.completion and chat.completion.chunk objects.
type chatFormat struct {
	params
	server    *Server
	id        string
	created   int64
	sequences []*sequence

	head []byte // of every chunk
}

// fingerprint returns system_fingerprint as JSON.
func (s *Server) fingerprint() string {
	return string(appendQuoted(nil, "vllm-"+s.cfg.Version+"-simulated"))
}

func (f *chatFormat) appendChunkHead(b []byte) []byte {
	if f.head == nil {
		f.head = appendQuoted([]byte(`data: {"id":`), f.id)
		f.head = append(f.head, `,"object":"chat.completion.chunk","created":`...)
		f.head = strconv.AppendInt(f.head, f.created, 10)
		f.head = appendQuoted(append(f.head, `,"model":`...), f.model)
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(b, f.head...)
}

func (f *chatFormat) appendBeforePrefill(b []byte) (unchanged []byte) { return b }

func (f *chatFormat) appendBeforeFirstToken(b []byte) []byte {
	for _, q := range f.sequences {
		b = append(f.appendChunkHead(b), `{"index":`...)
		b = strconv.AppendInt(b, int64(q.index), 10)
		b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		b = f.appendRunningUsage(b, q, 0)
		b = append(b, `,"prompt_token_ids":null,"prompt_text":null}`+"\n\n"...)
	}
	return b
}

func (f *chatFormat) appendTokens(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte {
	if len(q.calls) > 0 {
		return f.appendPieces(b, q, fromToken, toToken, end)
	}
	b = append(f.appendBeforeDelta(b, q), '{')
	if text := q.textBetween(fromToken, toToken); text != "" { // the end of a turn has no text
		b = appendQuoted(append(b, `"content":`...), text)
	}
	return f.appendAfterDelta(append(b, '}'), q, toToken, end.String())
}

// appendPieces is appendTokens for an output with tool calls. The end has a chunk of its own.
func (f *chatFormat) appendPieces(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte {
	for _, p := range q.piecesBetween(fromToken, toToken) {
		if p.call < 0 {
			b = appendQuoted(append(f.appendBeforeDelta(b, q), `{"content":`...), p.text)
			b = f.appendAfterDelta(append(b, '}'), q, toToken, "")
			continue
		}
		call, index := q.calls[p.call], strconv.Itoa(p.call)
		if p.begins {
			b = append(f.appendBeforeDelta(b, q), `{"content":null,"tool_calls":[{"id":"`+call.id+`","type":"function","index":`+index+
				`,"function":{"name":`...)
			b = f.appendAfterDelta(append(appendQuoted(b, call.name), `}}]}`...), q, toToken, "")
		}
		if p.text != "" {
			b = append(f.appendBeforeDelta(b, q), `{"content":null,"tool_calls":[{"index":`+index+`,"function":{"arguments":`...)
			b = f.appendAfterDelta(append(appendQuoted(b, p.text), `}}]}`...), q, toToken, "")
		}
	}
	if end != running {
		b = append(f.appendBeforeDelta(b, q), "{}"...)
		b = f.appendAfterDelta(b, q, toToken, q.finishReason(end))
	}
	return b
}

// appendBeforeDelta appends the beginning of a chunk, up to its delta.
func (f *chatFormat) appendBeforeDelta(b []byte, q *sequence) []byte {
	b = append(f.appendChunkHead(b), `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	return append(b, `,"delta":`...)
}

// appendAfterDelta appends the rest of a chunk after its delta; finish is empty while
// the choice runs. tokens are those generated so far.
func (f *chatFormat) appendAfterDelta(b []byte, q *sequence, tokens int, finishReason string) []byte {
	b = append(b, `,"logprobs":null,"finish_reason":`...)
	if finishReason == "" {
		b = append(b, `null,"token_ids":null}]`...)
	} else {
		b = append(b, `"`+finishReason+`","stop_reason":null,"token_ids":null}]`...)
		if !f.includeUsage { // else it is in the chunk with the usage
			b = append(b, `,"system_fingerprint":`+f.server.fingerprint()...)
		}
	}
	b = f.appendRunningUsage(b, q, tokens)
	return append(b, "}\n\n"...)
}

// appendRunningUsage appends the usage so far if the request wants it in every chunk.
func (f *chatFormat) appendRunningUsage(b []byte, q *sequence, tokens int) []byte {
	if !f.continuousUsage {
		return b
	}
	return f.server.appendUsage(append(b, `,"usage":`...), usage{prompt: q.Prompt, completion: tokens}, usageRunning)
}

func (f *chatFormat) appendStreamEnd(b []byte) []byte {
	if f.includeUsage {
		b = append(f.appendChunkHead(b), `],"usage":`...)
		b = f.server.appendUsage(b, sumUsage(f.sequences, f.n), usageChatStream)
		b = append(b, `,"system_fingerprint":`+f.server.fingerprint()+"}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (f *chatFormat) appendFailure(b []byte, e apiError) []byte {
	return appendErrorEvent(b, e)
}

func (f *chatFormat) fullResponse() []byte {
	b := appendQuoted([]byte(`{"id":`), f.id)
	b = append(b, `,"object":"chat.completion","created":`...)
	b = strconv.AppendInt(b, f.created, 10)
	b = appendQuoted(append(b, `,"model":`...), f.model)
	b = append(b, `,"choices":[`...)
	for i, q := range f.sequences {
		if i > 0 {
			b = append(b, ',')
		}
		b = f.appendChoice(b, q)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`+f.server.fingerprint()+`,"usage":`...)
	b = f.server.appendUsage(b, sumUsage(f.sequences, f.n), usageChat)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":`+
		f.server.formatTransferParams(f.sequences)...)
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}

func (f *chatFormat) appendChoice(b []byte, q *sequence) []byte {
	tokens, end := q.loadProgress()
	content := q.contentBefore(tokens)
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	b = appendQuoted(append(b, `,"message":{"role":"assistant","content":`...), content)
	b = append(b, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
	separator := `,"tool_calls":[`
	for i, arguments := range q.callsBefore(tokens) {
		b = append(append(b, separator...), `{"id":"`+q.calls[i].id+`","type":"function","function":{"name":`...)
		b = appendQuoted(append(appendQuoted(b, q.calls[i].name), `,"arguments":`...), arguments)
		b = append(b, "}}"...)
		separator = ","
	}
	if separator == "," {
		b = append(b, ']')
	}
	return append(b, `,"reasoning":null},"logprobs":null,"finish_reason":"`+q.finishReason(end)+
		`","stop_reason":null,"token_ids":null,"routed_experts":null}`...)
}
