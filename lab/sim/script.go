package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/tidwall/gjson"
)

const (
	maxScriptBytes = 1 << 20
	maxReplyBytes  = 64 << 10
)

// Script is the replies of every conversation that offers tools, in their order. Its JSON
// form is a list such as [{"text": "", "tool_calls": [{"name": "f", "arguments": {}}]}].
// A reply is one for the number of turns that the assistant has had, so a conversation can
// be resumed, branch and move to another replica. Further turns are generated.
type Script []Reply

// Reply is text and the tool calls after it. It must be ASCII, since a token has part of a
// character otherwise.
type Reply struct {
	Text      string         `json:"text"`
	ToolCalls []ScriptedCall `json:"tool_calls"`
}

// ScriptedCall is a tool call of a Reply. Arguments are an object.
type ScriptedCall struct {
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments"`
}

// ReadScript reads and checks a script of at most 1 MiB.
func ReadScript(r io.Reader) (Script, error) {
	raw, err := io.ReadAll(io.LimitReader(r, maxScriptBytes+1))
	if err != nil {
		return nil, err
	}
	if len(raw) > maxScriptBytes {
		return nil, fmt.Errorf("script exceeds %d bytes", maxScriptBytes)
	}
	in := json.NewDecoder(bytes.NewReader(raw))
	in.DisallowUnknownFields()
	var script Script
	if err := in.Decode(&script); err != nil {
		return nil, fmt.Errorf("parse script: %w", err)
	}
	if _, err := in.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("parse script: more follows the list of replies")
	}
	for i := range script {
		if err := script[i].check(); err != nil {
			return nil, fmt.Errorf("reply %d: %w", i, err)
		}
	}
	return script, nil
}

// check returns an error for what cannot be a reply, and removes spaces from the arguments:
// clients send those of Messages back without any.
func (r *Reply) check() error {
	size := len(r.Text)
	if i := indexNonASCII(r.Text); i >= 0 {
		return fmt.Errorf("text is not ASCII at byte %d", i)
	}
	if len(r.Text) == 0 && len(r.ToolCalls) == 0 {
		return errors.New("has neither text nor tool_calls")
	}
	for i := range r.ToolCalls {
		c := &r.ToolCalls[i]
		var compact bytes.Buffer
		switch err := json.Compact(&compact, c.Arguments); {
		case c.Name == "":
			return fmt.Errorf("tool call %d has no name", i)
		case err != nil || compact.Bytes()[0] != '{':
			return fmt.Errorf("arguments of tool call %d are not an object", i)
		case indexNonASCII(c.Name) >= 0 || indexNonASCII(compact.String()) >= 0:
			return fmt.Errorf("tool call %d is not ASCII", i)
		}
		c.Arguments = compact.Bytes()
		size += len(c.Name) + len(c.Arguments)
	}
	if size > maxReplyBytes {
		return fmt.Errorf("exceeds %d bytes", maxReplyBytes)
	}
	return nil
}

// indexNonASCII returns the index of the first byte of text above 0x7F, or -1.
func indexNonASCII(text string) int {
	for i := range len(text) {
		if text[i] > 0x7F {
			return i
		}
	}
	return -1
}

// nextTurnOutput returns the output for a conversation, or nil if the script has none. Messages of
// the assistant in a row are one turn.
func (s Script) nextTurnOutput(messages []gjson.Result) *output {
	turns, last := 0, ""
	for _, m := range messages {
		role := m.Get("role").Str
		if role == "assistant" && last != "assistant" {
			turns++
		}
		last = role
	}
	if turns >= len(s) {
		return nil
	}
	out := &output{text: []byte(s[turns].Text), finish: "tool_calls"}
	for _, c := range s[turns].ToolCalls {
		out.addCall(c.Name, string(c.Arguments))
	}
	return out
}
