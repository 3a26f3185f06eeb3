package sim

import (
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

// responses handles POST /v1/responses with one text message. Responses are not
// stored, so that none can be continued.
func (s *Server) responses(w http.ResponseWriter, r *http.Request) {
	f, err := s.readResponses(r)
	if err != nil {
		writeError(w, err)
		return
	}
	s.generate(w, r, f.stream, []*sequence{f.sequence}, f)
}

func (s *Server) readResponses(r *http.Request) (*responseFormat, error) {
	in, err := readBody(r)
	if err != nil {
		return nil, err
	}
	if err := in.validate("input"); err != nil {
		return nil, err
	}
	p, err := s.readParams(in, "max_output_tokens")
	if err != nil {
		return nil, err
	}
	if in.has("previous_response_id") {
		return nil, apiError{status: http.StatusNotFound, kind: "invalid_request_error",
			message: "Response with id '" + in["previous_response_id"].String() + "' not found.", param: "response_id"}
	}
	text, err := s.renderChat(withSystem(in["instructions"].Str, in["input"]))
	if err != nil {
		return nil, err
	}
	q, err := s.sequence(p, tokenize(text, nil), 0, nil)
	if err != nil {
		return nil, err
	}
	f := &responseFormat{params: p, sequence: q, id: "resp_" + requestID(r), item: "msg_" + randomID(), created: time.Now().Unix(), temperature: "1.0"}
	if t := in["temperature"]; t.Type == gjson.Number {
		f.temperature = pythonFloat(t.Num)
	}
	return f, nil
}

// withSystem returns the messages of another endpoint as those of a chat.
func withSystem(system string, turns gjson.Result) fields {
	b := []byte{'['}
	if system != "" {
		b = append(appendQuoted(append(b, `{"role":"system","content":`...), system), "},"...)
	}
	if turns.Type == gjson.String {
		b = append(appendQuoted(append(b, `{"role":"user","content":`...), turns.Str), "}]"...)
	} else {
		b = append(b, turns.Raw[min(1, len(turns.Raw)):]...)
	}
	return fields{"messages": gjson.ParseBytes(b)}
}

// responseFormat writes a response object, or its events.
type responseFormat struct {
	params
	sequence    *sequence
	id, item    string
	created     int64
	temperature string

	number int  // of the next event
	begun  bool // the message's item has begun
}

// event appends an event. Members are sorted by name: after those follow the number.
func (f *responseFormat) event(b []byte, name, before string, after ...string) []byte {
	b = append(b, "event: "+name+"\ndata: {"+before+`,"sequence_number":`...)
	b = strconv.AppendInt(b, int64(f.number), 10)
	f.number++
	for _, members := range after {
		b = append(b, ","+members...)
	}
	return append(b, `,"type":"`+name+"\"}\n\n"...)
}

// streamStart appends the events before the engine's output.
func (f *responseFormat) streamStart(b []byte) []byte {
	object := `"response":` + string(f.object("in_progress", "", "null"))
	b = f.event(b, "response.created", object)
	return f.event(b, "response.in_progress", object)
}

// firstOutput appends nothing: the message's item begins with its first text.
func (f *responseFormat) firstOutput(b []byte) []byte { return b }

func (f *responseFormat) beginItem(b []byte) []byte {
	b = f.event(b, "response.output_item.added",
		`"item":{"id":"`+f.item+`","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null},"output_index":0`)
	return f.event(b, "response.content_part.added",
		`"content_index":0,"item_id":"`+f.item+`","output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]}`)
}

func (f *responseFormat) appendTokens(b []byte, q *sequence, from, to int, _ endReason) []byte {
	text := q.textBetween(from, to)
	if text == "" {
		return b
	}
	if !f.begun {
		f.begun = true
		b = f.beginItem(b)
	}
	return f.event(b, "response.output_text.delta", `"content_index":0,"delta":`+string(appendQuoted(nil, text))+
		`,"item_id":"`+f.item+`","logprobs":[],"output_index":0`)
}

func (f *responseFormat) streamEnd(b []byte) []byte {
	if !f.begun {
		return f.event(b, "response.completed", `"response":`+string(f.complete()))
	}
	text := string(appendQuoted(nil, f.text()))
	b = f.event(b, "response.output_text.done", `"content_index":0,"item_id":"`+f.item+`","logprobs":[],"output_index":0`, `"text":`+text)
	b = f.event(b, "response.content_part.done", `"content_index":0,"item_id":"`+f.item+`","output_index":0,"part":`+part(text))
	b = f.event(b, "response.output_item.done", `"item":`+f.message()+`,"output_index":0`)
	return f.event(b, "response.completed", `"response":`+string(f.complete()))
}

func (f *responseFormat) text() string {
	tokens, _ := f.sequence.load()
	return f.sequence.textBetween(0, tokens)
}

func part(text string) string {
	return `{"annotations":[],"text":` + text + `,"type":"output_text","logprobs":null}`
}

// message returns the item with the text, or "" without text.
func (f *responseFormat) message() string {
	if f.text() == "" {
		return ""
	}
	return `{"id":"` + f.item + `","content":[` + part(string(appendQuoted(nil, f.text()))) + `],"role":"assistant","status":"completed","type":"message","phase":null}`
}

func (f *responseFormat) engineFailure(b []byte) []byte { return b }

func (f *responseFormat) complete() []byte {
	u := sumUsage([]*sequence{f.sequence}, 1)
	status := "completed"
	if _, end := f.sequence.load(); end == lengthLimit {
		status = "incomplete"
	}
	total := `{"input_tokens":` + strconv.Itoa(u.prompt) +
		`,"input_tokens_details":{"cached_tokens":` + strconv.Itoa(u.cached) + `,"cache_write_tokens":` + strconv.Itoa(u.created) + `,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}` +
		`,"output_tokens":` + strconv.Itoa(u.completion) +
		`,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}` +
		`,"total_tokens":` + strconv.Itoa(u.prompt+u.completion) + `}`
	return f.object(status, f.message(), total)
}

func (f *responseFormat) object(status, output, usage string) []byte {
	incomplete, limit := "null", "null"
	if status == "incomplete" {
		incomplete = `{"reason":"max_output_tokens"}`
	}
	if f.maxTokens > 0 {
		limit = strconv.Itoa(f.maxTokens)
	}
	b := appendQuoted([]byte(`{"id":`), f.id)
	b = append(b, `,"created_at":`+strconv.FormatInt(f.created, 10)+`,"incomplete_details":`+incomplete+`,"instructions":null,"metadata":null,"model":`...)
	b = appendQuoted(b, f.model)
	b = append(b, `,"object":"response","output":[`+output+`],"parallel_tool_calls":true,"temperature":`+f.temperature+`,"tool_choice":"none","tools":[],"top_p":1.0,`+
		`"background":false,"max_output_tokens":`+limit+`,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,`+
		`"service_tier":"auto","status":"`+status+`","text":null,"top_logprobs":null,"truncation":"disabled","usage":`+usage...)
	return append(b, `,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`...)
}
