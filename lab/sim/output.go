package sim

import (
	"github.com/tidwall/gjson"
)

// output is what a sequence generates: text, then tool calls as the template renders them
// in the next turn.
type output struct {
	text   []byte
	calls  []toolCall
	finish string // finish_reason of a complete output with calls
}

// toolCall is a call in the text of an output.
type toolCall struct {
	id, name string
	start    int // of the call
	// The arguments are text[from:to].
	from, to int
}

const toolCallIDPrefix = "chatcmpl-tool-"

func toolCallText(name, arguments string) string {
	return `<tool_call>{"name": "` + name + `", "arguments": ` + arguments + `}</tool_call>`
}

// addCall adds a call. arguments is a JSON object.
func (o *output) addCall(name, arguments string) {
	c := toolCall{id: toolCallIDPrefix + randomID(), name: name, start: len(o.text)}
	o.text = append(o.text, toolCallText(name, arguments)...)
	c.to = len(o.text) - len("}</tool_call>")
	c.from = c.to - len(arguments)
	o.calls = append(o.calls, c)
}

// contentEnd returns the length of the text before the calls.
func (o *output) contentEnd() int {
	if len(o.calls) > 0 {
		return o.calls[0].start
	}
	return len(o.text)
}

// piece is a part of an output, of its content or of one call.
type piece struct {
	call   int    // index of the call; -1: content
	text   string // of the content, or of the call's arguments
	begins bool   // the call
	ends   bool   // the call
}

// textEnd returns the length of the text of the first tokens.
func (q *sequence) textEnd(tokens int) int { return min(tokens*q.bytesPerToken, len(q.text)) }

// textBetween returns the text of the output between two numbers of tokens.
func (q *sequence) textBetween(fromToken, toToken int) string {
	return string(q.text[q.textEnd(fromToken):q.textEnd(toToken)])
}

// piecesBetween returns the pieces of the output between two numbers of tokens. A call
// begins with its arguments.
func (q *sequence) piecesBetween(fromToken, toToken int) []piece {
	from, to := q.textEnd(fromToken), q.textEnd(toToken)
	var pieces []piece
	if end := min(to, q.contentEnd()); from < end {
		pieces = append(pieces, piece{call: -1, text: string(q.text[from:end])})
	}
	for i, c := range q.calls {
		p := piece{call: i, begins: from < c.from && to >= c.from, ends: from < c.to && to >= c.to}
		if begin, end := max(from, c.from), min(to, c.to); begin < end {
			p.text = string(q.text[begin:end])
		}
		if p.begins || p.text != "" {
			pieces = append(pieces, p)
		}
	}
	return pieces
}

// contentBefore returns the content among the first tokens.
func (q *sequence) contentBefore(tokens int) string {
	return string(q.text[:min(q.textEnd(tokens), q.contentEnd())])
}

// callsBefore returns the arguments of each call that begins among the first tokens, as far
// as they are among them.
func (q *sequence) callsBefore(tokens int) (arguments []string) {
	for _, c := range q.calls {
		if end := q.textEnd(tokens); end >= c.from {
			arguments = append(arguments, string(q.text[c.from:min(end, c.to)]))
		}
	}
	return arguments
}

// finishReason returns OpenAI's finish_reason for an end.
func (q *sequence) finishReason(end endReason) string {
	if end == stopped && len(q.calls) > 0 {
		return q.finish
	}
	return end.String()
}

// demandedOrScripted returns the output of a chat with a call that it demands, else the
// reply that the script has for it, else nil.
func (s *Server) demandedOrScripted(chat fields) (*output, error) {
	choice, tools := chat["tool_choice"], chat["tools"].Array()
	switch {
	case choice.Str == "none":
		return nil, nil
	case !chat.has("tool_choice"), choice.Str == "auto":
		if len(tools) == 0 {
			return nil, nil
		}
		return s.cfg.Script.nextTurnOutput(chat["messages"].Array()), nil
	case len(tools) == 0:
		return nil, badParam("tool_choice", "When using `tool_choice`, `tools` must be set.")
	}
	out := &output{finish: "tool_calls"}
	tool := tools[0]
	if choice.IsObject() {
		out.finish = "stop"
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
	out.addCall(tool.Get("function.name").Str, string(appendExample(nil, tool.Get("function.parameters"), 0)))
	return out, nil
}

// appendExample appends a value that a JSON schema of common keywords allows, nested
// at most eight levels.
func appendExample(b []byte, schema gjson.Result, depth int) []byte {
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
			b = append(appendQuoted(b, name.Str), ": "...)
			b = appendExample(b, properties[name.Str], depth+1)
		}
	}
	return append(b, '}')
}
