package sim

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

// responses handles POST /v1/responses with one text message. Complete responses are stored
// if the replica has a store.
func (s *Server) responses(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err != nil {
		writeError(w, err)
		return
	}
	f, err := s.readResponsesRequest(r, in)
	if err != nil {
		s.refuse(w, r, in, err)
		return
	}
	s.generate(w, r, f.stream, []*sequence{f.sequence}, f)
}

func (s *Server) readResponsesRequest(r *http.Request, in fields) (*responseFormat, error) {
	if err := in.validateTypes("input"); err != nil {
		return nil, err
	}
	p, err := s.readParams(in, "max_output_tokens")
	if err != nil {
		return nil, err
	}
	p.session = sessionID(r, in["session_id"], in["vllm_xargs"])
	if err := s.continueStored(in); err != nil {
		return nil, err
	}
	chat := chatOfResponses(in)
	out, err := s.demandedOrScripted(chat)
	if err != nil {
		return nil, err
	}
	text, err := s.renderChat(chat)
	if err != nil {
		return nil, err
	}
	q, err := s.newSequence(p, s.tokenizer().tokenize(text, nil), 0, out)
	if err != nil {
		return nil, err
	}
	f := &responseFormat{params: p, server: s, sequence: q, id: "resp_" + randomID(), item: "msg_" + randomID(), created: time.Now().Unix(),
		temperature: "1.0", toolChoice: `"none"`, tools: "[]"}
	if in.has("request_id") {
		f.id = in["request_id"].Str
	}
	if s.cfg.StoreResponses && (!in.has("store") || in["store"].Bool()) {
		items := inputItems(in["input"])
		f.save = func(output string, object []byte) {
			s.stored.add(f.id, storedResponse{joinItems(items, output), object})
		}
	}
	if in["tools"].IsArray() {
		f.toolChoice, f.tools = `"auto"`, string(appendResponseTools(nil, in["tools"]))
	}
	if in.has("tool_choice") {
		f.toolChoice = in["tool_choice"].Raw
	}
	if t := in["temperature"]; t.Type == gjson.Number {
		f.temperature = formatPythonFloat(t.Num)
	}
	return f, nil
}

// appendResponseTools appends tools as a response repeats them: with every member that
// functions may have.
func appendResponseTools(b []byte, tools gjson.Result) []byte {
	b = append(b, '[')
	for i, tool := range tools.Array() {
		if i > 0 {
			b = append(b, ',')
		}
		if tool.Get("type").Str != "function" {
			b = append(b, tool.Raw...)
			continue
		}
		separator := byte('{')
		for _, name := range [...]string{"name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description",
			"output_schema"} {
			b = append(appendQuoted(append(b, separator), name), ':')
			separator = ','
			if v := tool.Get(name); v.Exists() {
				b = append(b, v.Raw...)
			} else {
				b = append(b, "null"...)
			}
		}
		b = append(b, '}')
	}
	return append(b, ']')
}

// responseFormat writes a response object, or its events.
type responseFormat struct {
	params
	server      *Server
	sequence    *sequence
	id, item    string // item: the message's id
	created     int64
	temperature string
	toolChoice  string // JSON
	tools       string // JSON

	// save stores the complete response, of which output are the items; nil: it is not stored.
	save func(output string, object []byte)

	number int  // of the next event
	begun  bool // the message's item has begun
	ended  bool // the message's item has ended
}

// appendNumberedEvent appends an event with the next sequence_number. Members are sorted
// by name, so some stand before the number and some after it.
func (f *responseFormat) appendNumberedEvent(b []byte, name, membersBefore string, membersAfter ...string) []byte {
	b = append(b, "event: "+name+"\ndata: {"+membersBefore+`,"sequence_number":`...)
	b = strconv.AppendInt(b, int64(f.number), 10)
	f.number++
	for _, members := range membersAfter {
		b = append(b, ","+members...)
	}
	return append(b, `,"type":"`+name+"\"}\n\n"...)
}

// appendBeforePrefill appends the events before the engine's output.
func (f *responseFormat) appendBeforePrefill(b []byte) []byte {
	object := `"response":` + string(f.formatObject("in_progress", "", "null", "null"))
	b = f.appendNumberedEvent(b, "response.created", object)
	return f.appendNumberedEvent(b, "response.in_progress", object)
}

// appendBeforeFirstToken appends nothing: the message's item begins with its first text.
func (f *responseFormat) appendBeforeFirstToken(b []byte) (unchanged []byte) { return b }

func (f *responseFormat) appendItemStart(b []byte) []byte {
	b = f.appendNumberedEvent(b, "response.output_item.added",
		`"item":{"id":"`+f.item+`","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null},"output_index":0`)
	return f.appendNumberedEvent(b, "response.content_part.added",
		`"content_index":0,"item_id":"`+f.item+`","output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]}`)
}

func (f *responseFormat) appendTokens(b []byte, q *sequence, fromToken, toToken int, _ endReason) []byte {
	for _, p := range q.piecesBetween(fromToken, toToken) {
		if p.call >= 0 {
			b = f.appendCallPiece(f.appendMessageEnd(b), p)
			continue
		}
		if !f.begun {
			f.begun = true
			b = f.appendItemStart(b)
		}
		b = f.appendNumberedEvent(b, "response.output_text.delta", `"content_index":0,"delta":`+string(appendQuoted(nil, p.text))+
			`,"item_id":"`+f.item+`","logprobs":[],"output_index":0`)
	}
	return b
}

// appendCallPiece appends the events for a piece of a tool call.
func (f *responseFormat) appendCallPiece(b []byte, p piece) []byte {
	call := f.sequence.calls[p.call]
	index := p.call
	if f.begun {
		index++ // after the message
	}
	at := `,"output_index":` + strconv.Itoa(index)
	if p.begins {
		b = f.appendNumberedEvent(b, "response.output_item.added", `"item":`+call.item("", "in_progress")+at)
	}
	if p.text != "" {
		b = f.appendNumberedEvent(b, "response.function_call_arguments.delta", `"delta":`+string(appendQuoted(nil, p.text))+`,"item_id":"`+
			call.itemID()+`"`+at)
	}
	if p.ends {
		arguments := string(f.sequence.text[call.from:call.to])
		b = f.appendNumberedEvent(b, "response.function_call_arguments.done", `"arguments":`+string(appendQuoted(nil, arguments))+`,"item_id":"`+
			call.itemID()+`"`+at)
		b = append(appendQuoted(append(b[:len(b)-len("}\n\n")], `,"name":`...), call.name), "}\n\n"...) // the only member after the type
		b = f.appendNumberedEvent(b, "response.output_item.done", `"item":`+call.item(arguments, "completed")+at)
	}
	return b
}

// itemID returns the id of the call's item.
func (c *toolCall) itemID() string { return "fc_" + strings.TrimPrefix(c.id, toolCallIDPrefix) }

// item returns the call as an item of a response.
func (c *toolCall) item(arguments, status string) string {
	b := appendQuoted([]byte(`{"arguments":`), arguments)
	b = appendQuoted(append(b, `,"call_id":"`+c.id+`","name":`...), c.name)
	return string(b) + `,"type":"function_call","id":"` + c.itemID() + `","async":null,"caller":null,"namespace":null,"status":"` + status +
		`"}`
}

// appendMessageEnd appends the events that end the message's item, if it is open.
func (f *responseFormat) appendMessageEnd(b []byte) []byte {
	if !f.begun || f.ended {
		return b
	}
	f.ended = true
	text := string(appendQuoted(nil, f.outputText()))
	b = f.appendNumberedEvent(b, "response.output_text.done", `"content_index":0,"item_id":"`+f.item+`","logprobs":[],"output_index":0`,
		`"text":`+text)
	b = f.appendNumberedEvent(b, "response.content_part.done", `"content_index":0,"item_id":"`+f.item+`","output_index":0,"part":`+
		contentPart(text))
	return f.appendNumberedEvent(b, "response.output_item.done", `"item":`+f.messageItem()+`,"output_index":0`)
}

func (f *responseFormat) appendStreamEnd(b []byte) []byte {
	return f.appendNumberedEvent(f.appendMessageEnd(b), "response.completed", `"response":`+string(f.fullResponse()))
}

func (f *responseFormat) outputText() string {
	tokens, _ := f.sequence.loadProgress()
	return f.sequence.contentBefore(tokens)
}

func contentPart(quotedText string) string {
	return `{"annotations":[],"text":` + quotedText + `,"type":"output_text","logprobs":null}`
}

// messageItem returns the item with the text, or "" without text.
func (f *responseFormat) messageItem() string {
	if f.outputText() == "" {
		return ""
	}
	return `{"id":"` + f.item + `","content":[` + contentPart(string(appendQuoted(nil, f.outputText()))) +
		`],"role":"assistant","status":"completed","type":"message","phase":null}`
}

// outputItems returns the items of the output: the message and the calls.
func (f *responseFormat) outputItems() string {
	var items []string
	if m := f.messageItem(); m != "" {
		items = append(items, m)
	}
	tokens, _ := f.sequence.loadProgress()
	for i, arguments := range f.sequence.callsBefore(tokens) {
		items = append(items, f.sequence.calls[i].item(arguments, "completed"))
	}
	return strings.Join(items, ",")
}

// appendFailure appends nothing: the connection is closed.
func (f *responseFormat) appendFailure(b []byte, _ apiError) (unchanged []byte) { return b }

// fullResponse returns the complete response, after storing it: a client may continue it at
// once.
func (f *responseFormat) fullResponse() []byte {
	u := sumUsage([]*sequence{f.sequence}, 1)
	status := "completed"
	if _, end := f.sequence.loadProgress(); end == lengthLimit {
		status = "incomplete"
	}
	total := `{"input_tokens":` + strconv.Itoa(u.prompt) +
		`,"input_tokens_details":{"cached_tokens":` + strconv.Itoa(u.cached) + `,"cache_write_tokens":` + strconv.Itoa(u.created) +
		`,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}` +
		`,"output_tokens":` + strconv.Itoa(u.completion) +
		`,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}` +
		`,"total_tokens":` + strconv.Itoa(u.prompt+u.completion) + `}`
	output := f.outputItems()
	transfer := "null"
	if !f.stream {
		transfer = f.server.formatTransferParams([]*sequence{f.sequence})
	}
	object := f.formatObject(status, output, total, transfer)
	if f.save != nil {
		f.save(output, object)
	}
	return object
}

func (f *responseFormat) formatObject(status, output, usage, transfer string) []byte {
	incomplete, limit := "null", "null"
	if status == "incomplete" {
		incomplete = `{"reason":"max_output_tokens"}`
	}
	if f.maxTokens > 0 {
		limit = strconv.Itoa(f.maxTokens)
	}
	b := appendQuoted([]byte(`{"id":`), f.id)
	b = append(b, `,"created_at":`+strconv.FormatInt(f.created, 10)+`,"incomplete_details":`+incomplete+
		`,"instructions":null,"metadata":null,"model":`...)
	b = appendQuoted(b, f.model)
	b = append(b, `,"object":"response","output":[`+output+`],"parallel_tool_calls":true,"temperature":`+f.temperature+`,"tool_choice":`+
		f.toolChoice+`,"tools":`+f.tools+`,"top_p":1.0,`+
		`"background":false,"max_output_tokens":`+limit+`,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,`+
		`"service_tier":"auto","status":"`+status+`","text":null,"top_logprobs":null,"truncation":"disabled","usage":`+usage...)
	return append(b, `,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":`+transfer+
		`,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`...)
}
