package sim

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

const testScript = `[
	{"text": "Let me see.", "tool_calls": [{"name": "ls", "arguments": { "path" : "." }}, {"name": "read", "arguments": {"path": "a.txt", "lines": [1, 2]}}]},
	{"text": "Done."}]`

// scriptedTurn is what a client reads from a response.
type scriptedTurn struct {
	text   string
	calls  []ScriptedCall
	finish string
}

func (r *scriptedTurn) String() string { return fmt.Sprintf("%q, %s, %s", r.text, r.calls, r.finish) }

func (c ScriptedCall) String() string { return c.Name + string(c.Arguments) }

// addDelta adds a chat's delta, whose calls have an index.
func (r *scriptedTurn) addDelta(delta gjson.Result) {
	r.text += delta.Get("content").String()
	for _, call := range delta.Get("tool_calls").Array() {
		if name := call.Get("function.name"); name.Exists() {
			r.calls = append(r.calls, ScriptedCall{Name: name.Str})
		}
		last := &r.calls[call.Get("index").Int()]
		last.Arguments = append(last.Arguments, call.Get("function.arguments").Str...)
	}
}

// addPart adds a content block, or an item of a response.
func (r *scriptedTurn) addPart(part gjson.Result) {
	switch part.Get("type").Str {
	case "text", "output_text":
		r.text += part.Get("text").Str
	case "message":
		for _, p := range part.Get("content").Array() {
			r.addPart(p)
		}
	case "tool_use":
		r.calls = append(r.calls, ScriptedCall{part.Get("name").Str, json.RawMessage(part.Get("input").Raw)})
	case "function_call":
		r.calls = append(r.calls, ScriptedCall{part.Get("name").Str, json.RawMessage(part.Get("arguments").Str)})
	}
}

// extendCall adds to the arguments of the last call.
func (r *scriptedTurn) extendCall(arguments string) {
	last := &r.calls[len(r.calls)-1]
	last.Arguments = append(last.Arguments, arguments...)
}

// readWholeTurn reads the body of a response that is not a stream.
func readWholeTurn(v gjson.Result) *scriptedTurn {
	r := &scriptedTurn{finish: v.Get("choices.0.finish_reason").Str + v.Get("stop_reason").Str + v.Get("status").Str}
	for _, list := range []string{"content", "output"} {
		for _, part := range v.Get(list).Array() {
			r.addPart(part)
		}
	}
	message := v.Get("choices.0.message")
	r.text += message.Get("content").Str
	for _, call := range message.Get("tool_calls").Array() {
		r.calls = append(r.calls, ScriptedCall{call.Get("function.name").Str, json.RawMessage(call.Get("function.arguments").Str)})
	}
	return r
}

// readStreamedTurn reads the events of a stream.
func readStreamedTurn(t *testing.T, body string) *scriptedTurn {
	t.Helper()
	r := &scriptedTurn{}
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		switch v := gjson.Parse(data); v.Get("type").Str {
		case "":
			r.addDelta(v.Get("choices.0.delta"))
			r.finish += v.Get("choices.0.finish_reason").Str
		case "content_block_start":
			r.addPart(v.Get("content_block"))
			if v.Get("content_block.type").Str == "tool_use" {
				r.calls[len(r.calls)-1].Arguments = nil // they come in deltas
			}
		case "content_block_delta":
			r.text += v.Get("delta.text").Str
			if part := v.Get("delta.partial_json"); part.Exists() {
				r.extendCall(part.Str)
			}
		case "message_delta":
			r.finish += v.Get("delta.stop_reason").Str
		case "response.output_text.delta":
			r.text += v.Get("delta").Str
		case "response.output_item.added":
			r.addPart(v.Get("item"))
		case "response.function_call_arguments.delta":
			r.extendCall(v.Get("delta").Str)
		case "response.completed":
			r.finish = v.Get("response.status").Str
			if whole := readWholeTurn(v.Get("response")); whole.String() != r.String() {
				t.Errorf("the events said %s, the response %s", r, whole)
			}
		}
	}
	return r
}

// TestScript plays a scripted conversation of three turns over each API. The second request
// has to find the first and its reply in the cache; the third turn has no reply.
func TestScript(t *testing.T) {
	script, err := ReadScript(strings.NewReader(testScript))
	if err != nil {
		t.Fatal(err)
	}
	const (
		question  = `{"role":"user","content":"What is there? It has to be longer than one block of sixteen tokens."}`
		lsPath    = `{"path":"."}`
		readPath  = `{"path":"a.txt","lines":[1,2]}`
		firstTurn = `"Let me see.", [ls` + lsPath + ` read` + readPath + `], `
	)
	quoted := func(s string) string { return string(appendQuoted(nil, s)) }
	for _, api := range []struct {
		path, list, tools, history, cached string
		finish                             [2]string
	}{
		{"/v1/chat/completions", "messages", `[{"type":"function","function":{"name":"ls"}}]`,
			`{"role":"assistant","content":"Let me see.","tool_calls":[{"function":{"name":"ls","arguments":` + quoted(lsPath) + `}},
				{"function":{"name":"read","arguments":` + quoted(readPath) + `}}]},
			{"role":"tool","content":"a.txt"},{"role":"tool","content":"one"}`, "usage.prompt_tokens_details.cached_tokens",
			[2]string{"tool_calls", "stop"}},
		{"/v1/messages", "messages", `[{"name":"ls","input_schema":{}}]`,
			`{"role":"assistant","content":[{"type":"text","text":"Let me see."},{"type":"tool_use","name":"ls","input":` + lsPath + `},
				{"type":"tool_use","name":"read","input":` + readPath + `}]},
			{"role":"user","content":[{"type":"tool_result","content":"a.txt"},{"type":"tool_result","content":"one"}]}`,
			"usage.cache_read_input_tokens", [2]string{"tool_use", "end_turn"}},
		{"/v1/responses", "input", `[{"type":"function","name":"ls"}]`,
			`{"role":"assistant","content":"Let me see."},{"type":"function_call","name":"ls","arguments":` + quoted(lsPath) + `},
			{"type":"function_call","name":"read","arguments":` + quoted(readPath) + `},
			{"type":"function_call_output","output":"a.txt"},{"type":"function_call_output","output":"one"}`,
			"usage.input_tokens_details.cached_tokens", [2]string{"completed", "completed"}},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(api.path, " stream ", stream), func(t *testing.T) {
				s := start(t, Config{Engine: fast, Script: script})
				turn := func(history, tools string) string {
					t.Helper()
					status, body := post(t, s, api.path, fmt.Sprintf(`{"model":"sim","max_tokens":400,%q:[%s],"tools":%s,"stream":%t}`, api.list, history,
						tools, stream))
					if status != 200 {
						t.Fatalf("status %d: %s", status, body)
					}
					return body
				}
				read := func(body string) *scriptedTurn {
					if stream {
						return readStreamedTurn(t, body)
					}
					return readWholeTurn(gjson.Parse(body))
				}
				if got, want := read(turn(question, api.tools)).String(), firstTurn+api.finish[0]; got != want {
					t.Errorf("got  %s\nwant %s", got, want)
				}
				history := question + "," + api.history
				body := turn(history, api.tools)
				if got, want := read(body).String(), `"Done.", [], `+api.finish[1]; got != want {
					t.Errorf("got  %s\nwant %s", got, want)
				}
				if cached := gjson.Get(body, api.cached).Int(); !stream && cached < 48 {
					t.Errorf("%d tokens cached, want those of the first turn and its reply", cached)
				}
				for _, generated := range []string{
					turn(history+`,{"role":"assistant","content":"Done."},{"role":"user","content":"And?"}`, api.tools),
					turn(question, "[]"),
				} {
					if got := read(generated); got.text == "" || len(got.calls) > 0 || got.text == "Done." {
						t.Errorf("got %s, want generated text", got)
					}
				}
			})
		}
	}
}

func TestInvalidScripts(t *testing.T) {
	for text, want := range map[string]string{
		``:                                "EOF",
		`{}`:                              "cannot unmarshal",
		`[] []`:                           "more follows",
		`[{"says":"x"}]`:                  `unknown field "says"`,
		`[{"text":"x"},{}]`:               "reply 1: has neither text nor tool_calls",
		`[{"text":"é"}]`:                  "reply 0: text is not ASCII at byte 0",
		`[{"tool_calls":[{"name":"f"}]}]`: "arguments of tool call 0 are not an object",
		`[{"tool_calls":[{"name":"f","arguments":"{}"}]}]`:         "arguments of tool call 0 are not an object",
		`[{"tool_calls":[{"arguments":{}}]}]`:                      "tool call 0 has no name",
		`[{"tool_calls":[{"name":"f","arguments":{"a":"é"}}]}]`:    "tool call 0 is not ASCII",
		`[{"text":"` + strings.Repeat("x", maxReplyBytes) + `x"}]`: "reply 0: exceeds 65536 bytes",
		strings.Repeat(" ", maxScriptBytes+1):                      "script exceeds 1048576 bytes",
	} {
		if _, err := ReadScript(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: got %v, want %q", text, err, want)
		}
	}
}

// FuzzScript checks that a script that is accepted gives outputs whose calls are in their text.
func FuzzScript(f *testing.F) {
	f.Add(testScript)
	f.Fuzz(func(t *testing.T, text string) {
		script, err := ReadScript(strings.NewReader(text))
		if err != nil {
			return
		}
		for i := range script {
			out := script[i:].nextTurnOutput(nil)
			for k, c := range out.calls {
				if want := string(script[i].ToolCalls[k].Arguments); string(out.text[c.from:c.to]) != want {
					t.Errorf("arguments %q, want %q", out.text[c.from:c.to], want)
				}
			}
		}
	})
}
