package sim

import (
	"strings"

	"github.com/tidwall/gjson"
)

// vLLM converts Messages and Responses bodies into chats. What the chat template reads is
// converted here: the messages and the tools.

// billingHeader begins a text that vLLM leaves out of system prompts.
const billingHeader = "x-anthropic-billing-header"

// chatOfMessages returns the messages and tools of the chat for a Messages body.
func chatOfMessages(in fields) fields {
	c := newChatConverter(systemText(in["system"]))
	if in["messages"].IsArray() {
		for _, m := range in["messages"].Array() {
			c.addBlockMessage(m)
		}
	}
	chat := fields{"messages": c.parsedMessages()}
	if in["tools"].IsArray() {
		chat["tools"] = convertTools(in["tools"], "input_schema")
	}
	if choice := in["tool_choice"]; choice.IsObject() {
		chat["tool_choice"] = convertToolChoice(choice.Get("type").Str, choice.Get("name"))
	}
	return chat
}

// chatOfResponses returns the messages and tools of the chat for a Responses body.
func chatOfResponses(in fields) fields {
	c := newChatConverter(in["instructions"].Str)
	if input := in["input"]; input.Type == gjson.String {
		c.addMessage("user", input.Raw, nil)
	} else if input.IsArray() {
		c.addItems(input.Array())
	}
	chat := fields{"messages": c.parsedMessages()}
	if in["tools"].IsArray() {
		chat["tools"] = convertTools(in["tools"], "parameters")
	}
	if choice := in["tool_choice"]; choice.IsObject() {
		chat["tool_choice"] = convertToolChoice(choice.Get("type").Str, choice.Get("name"))
	} else if choice.Exists() {
		chat["tool_choice"] = choice
	}
	return chat
}

// systemText returns the text of a system prompt, a string or a list of text blocks.
func systemText(v gjson.Result) string {
	if v.Type == gjson.String {
		return v.Str
	}
	if !v.IsArray() {
		return ""
	}
	var text strings.Builder
	for _, block := range v.Array() {
		if t := block.Get("text").String(); !strings.HasPrefix(t, billingHeader) {
			text.WriteString(t)
		}
	}
	return text.String()
}

// chatConverter writes the messages of a chat as JSON.
type chatConverter struct{ b []byte }

func newChatConverter(system string) *chatConverter {
	c := &chatConverter{b: []byte{'['}}
	if system != "" {
		c.addMessage("system", string(appendQuoted(nil, system)), nil)
	}
	return c
}

func (c *chatConverter) parsedMessages() gjson.Result {
	return gjson.Parse(string(append(c.b, ']')))
}

// addMessage adds a message. content is JSON, or "" for none.
func (c *chatConverter) addMessage(role, content string, calls []string) {
	if len(c.b) > 1 {
		c.b = append(c.b, ',')
	}
	c.b = appendQuoted(append(c.b, `{"role":`...), role)
	if content != "" {
		c.b = append(append(c.b, `,"content":`...), content...)
	}
	if len(calls) > 0 {
		c.b = append(c.b, `,"tool_calls":[`+strings.Join(calls, ",")+`]`...)
	}
	c.b = append(c.b, '}')
}

// addBlockMessage adds a message of the Messages API: the results of tools as messages of
// their own, then the rest.
func (c *chatConverter) addBlockMessage(m gjson.Result) {
	role, content := m.Get("role").Str, m.Get("content")
	if role == "system" {
		if text := systemText(content); text != "" && !strings.HasPrefix(text, billingHeader) {
			c.addMessage(role, string(appendQuoted(nil, text)), nil)
		}
		return
	}
	if !content.IsArray() {
		c.addMessage(role, content.Raw, nil)
		return
	}
	var parts, calls []string
	for _, block := range content.Array() {
		switch block.Get("type").Str {
		case "tool_use":
			calls = append(calls, convertCall(block.Get("name"), block.Get("input").Raw))
		case "tool_result":
			c.addMessage("tool", block.Get("content").Raw, nil)
		case "thinking", "redacted_thinking": // the template drops reasoning
		default:
			parts = append(parts, block.Raw)
		}
	}
	switch {
	case len(parts) > 0:
		c.addMessage(role, "["+strings.Join(parts, ",")+"]", calls)
	case role != "user":
		c.addMessage(role, "", calls)
	}
}

// addItems adds the items of a Responses input. Those of the assistant in a row are one
// message.
func (c *chatConverter) addItems(items []gjson.Result) {
	open, content := false, "" // of the assistant's message
	var calls []string
	closeMessage := func() {
		if open {
			c.addMessage("assistant", content, calls)
		}
		open, content, calls = false, "", nil
	}
	for _, item := range items {
		switch kind := item.Get("type").Str; {
		case kind == "function_call":
			open = true
			calls = append(calls, convertCall(item.Get("name"), item.Get("arguments").Raw))
		case kind == "function_call_output":
			closeMessage()
			c.addMessage("tool", item.Get("output").Raw, nil)
		case kind == "reasoning": // the template drops reasoning
		case item.Get("role").Str == "assistant":
			if content != "" || len(calls) > 0 {
				closeMessage()
			}
			open, content = true, item.Get("content").Raw
		default:
			closeMessage()
			c.addMessage(item.Get("role").Str, item.Get("content").Raw, nil)
		}
	}
	closeMessage()
}

// convertCall returns a tool call as a chat has it. arguments is JSON.
func convertCall(name gjson.Result, arguments string) string {
	if arguments == "" {
		arguments = "{}"
	}
	return `{"function":{"name":` + string(appendQuoted(nil, name.Str)) + `,"arguments":` + arguments + `}}`
}

// convertTools returns the functions among tools as a chat has them. schema is the name of
// the member with the parameters.
func convertTools(tools gjson.Result, schema string) gjson.Result {
	b := []byte{'['}
	for _, tool := range tools.Array() {
		if !tool.Get("name").Exists() {
			continue
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = appendQuoted(append(b, `{"type":"function","function":{"name":`...), tool.Get("name").Str)
		for _, member := range [...][2]string{{"description", "description"}, {"parameters", schema}} {
			if v := tool.Get(member[1]); v.Exists() {
				b = append(append(b, `,"`+member[0]+`":`...), v.Raw...)
			}
		}
		b = append(b, "}}"...)
	}
	return gjson.ParseBytes(append(b, ']'))
}

// convertToolChoice returns a choice of tools as a chat has it. kind is Messages' or
// Responses'.
func convertToolChoice(kind string, name gjson.Result) gjson.Result {
	switch kind {
	case "tool", "function":
		return gjson.Parse(`{"type":"function","function":{"name":` + string(appendQuoted(nil, name.Str)) + `}}`)
	case "any":
		kind = "required"
	}
	return gjson.ParseBytes(appendQuoted(nil, kind))
}
