package sim

import "github.com/tidwall/gjson"

// toolCall is the answer to a request that demands one.
type toolCall struct {
	name string
	text []byte // as the model writes it and the template renders it in the next turn
	// The arguments are text[from:to].
	from, to int
	finish   string // what vLLM calls a complete one: "stop" when the client named the function
}

func toolCallText(name, arguments string) string {
	return `<tool_call>{"name": "` + name + `", "arguments": ` + arguments + `}</tool_call>`
}

// readToolChoice returns the call that the client demands, or nil. With "auto"
// the simulated model prefers to talk.
func readToolChoice(in fields) (*toolCall, error) {
	choice := in["tool_choice"]
	if !in.has("tool_choice") || choice.Str == "auto" || choice.Str == "none" {
		return nil, nil
	}
	tools := in["tools"].Array()
	if len(tools) == 0 {
		return nil, badParam("tool_choice", "When using `tool_choice`, `tools` must be set.")
	}
	finish := "tool_calls"
	tool := tools[0]
	if choice.IsObject() {
		finish = "stop"
		tool = gjson.Result{}
		for _, t := range tools {
			if t.Get("function.name").Str == choice.Get("function.name").Str {
				tool = t
			}
		}
		if !tool.Exists() {
			return nil, badParam("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`")
		}
	}
	name := tool.Get("function.name").Str
	arguments := string(example(nil, tool.Get("function.parameters"), 0))
	c := &toolCall{name: name, text: []byte(toolCallText(name, arguments)), finish: finish}
	c.from = len(toolCallText(name, "")) - len("}</tool_call>")
	c.to = c.from + len(arguments)
	return c, nil
}

// example appends a value that a JSON schema allows, as far as it is made of
// the common keywords. Beyond a few levels an empty object has to do.
func example(b []byte, schema gjson.Result, depth int) []byte {
	if e := schema.Get("enum.0"); e.Exists() {
		return append(b, e.Raw...)
	}
	kind := schema.Get("type").String()
	switch {
	case kind == "string":
		return append(b, `"simulated"`...)
	case kind == "integer", kind == "number":
		return append(b, '1')
	case kind == "boolean":
		return append(b, "true"...)
	case kind == "null":
		return append(b, "null"...)
	case kind == "array":
		return append(b, "[]"...)
	}
	b = append(b, '{')
	first := true
	if depth < 8 {
		properties := schema.Get("properties").Map()
		for _, name := range schema.Get("required").Array() {
			if !first {
				b = append(b, ", "...)
			}
			first = false
			b = append(quote(b, name.Str), ": "...)
			b = example(b, properties[name.Str], depth+1)
		}
	}
	return append(b, '}')
}

// pieces appends the chunks of a stream for what became visible of the call.
func (c *toolCall) pieces(b []byte, f *chatFormat, q *sequence, from, to int, why reason) []byte {
	was, is := min(from*bytesPerToken, len(q.text)), min(to*bytesPerToken, len(q.text))
	if was < c.from && is >= c.from {
		b = f.choice(b, q)
		b = append(b, `{"content":null,"tool_calls":[{"id":"chatcmpl-tool-`+randomID()+`","type":"function","index":0,"function":{"name":`...)
		b = append(quote(b, c.name), `}}]}`...)
		b = f.choiceEnd(b, q, to, "")
	}
	if start, end := max(was, c.from), min(is, c.to); start < end {
		b = f.choice(b, q)
		b = append(b, `{"content":null,"tool_calls":[{"index":0,"function":{"arguments":`...)
		b = append(quote(b, string(q.text[start:end])), `}}]}`...)
		b = f.choiceEnd(b, q, to, "")
	}
	if why != running {
		b = append(f.choice(b, q), "{}"...)
		b = f.choiceEnd(b, q, to, c.finishReason(why))
	}
	return b
}

// message returns the members of a whole answer's message.
func (c *toolCall) message(q *sequence, tokens int, why reason) (calls []byte, content, finish string) {
	seen := min(tokens*bytesPerToken, len(q.text))
	if seen < c.from {
		return nil, "", c.finishReason(why)
	}
	b := []byte(`,"tool_calls":[{"id":"chatcmpl-tool-` + randomID() + `","type":"function","function":{"name":`)
	b = quote(b, c.name)
	b = quote(append(b, `,"arguments":`...), string(q.text[c.from:min(seen, c.to)]))
	return append(b, "}}]"...), "", c.finishReason(why)
}

func (c *toolCall) finishReason(why reason) string {
	if why == stopped {
		return c.finish
	}
	return why.String()
}
