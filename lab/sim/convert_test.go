package sim

import (
	"testing"

	"github.com/tidwall/gjson"
)

// TestDialectsConverted checks that a conversation has the same prompt in all three APIs.
func TestDialectsConverted(t *testing.T) {
	const schema = `{"type":"object","properties":{"path":{"type":"string"}}}`
	s := start(t, Config{Engine: fast})
	render := func(path, body string) string {
		t.Helper()
		in := fields{}
		gjson.Parse(body).ForEach(func(key, value gjson.Result) bool {
			in[key.Str] = value
			return true
		})
		switch path {
		case "/v1/messages":
			in = chatOfMessages(in)
		case "/v1/responses":
			in = chatOfResponses(in)
		}
		text, err := s.renderChat(in)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		return string(text)
	}
	chat := render("/v1/chat/completions", `{"messages":[{"role":"system","content":"You edit \"files\"."},{"role":"user","content":"Go."},
		{"role":"assistant","content":"I read it.","tool_calls":[{"id":"c1","type":"function","function":{"name":"read","arguments":"{\"path\":\"a\"}"}},
			{"id":"c2","type":"function","function":{"name":"read","arguments":"{\"path\":\"b\"}"}}]},
		{"role":"tool","tool_call_id":"c1","content":"one"},{"role":"tool","tool_call_id":"c2","content":"two"},{"role":"user","content":"And?"}],
		"tools":[{"type":"function","function":{"name":"read","description":"Reads.","parameters":`+schema+`}}]}`)
	messages := render("/v1/messages", `{"system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"You edit `+
		`"},{"type":"text","text":"\"files\"."}],
		"messages":[{"role":"user","content":[{"type":"text","text":"Go."}]},
		{"role":"assistant","content":[{"type":"thinking","thinking":"Hm."},{"type":"text","text":"I read it."},
			{"type":"tool_use","id":"c1","name":"read","input":{"path":"a"}},{"type":"tool_use","id":"c2","name":"read","input":{"path":"b"}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"c1","content":"one"},
			{"type":"tool_result","tool_use_id":"c2","content":[{"type":"text","text":"two"}]},{"type":"text","text":"And?"}]}],
		"tools":[{"name":"read","description":"Reads.","input_schema":`+schema+`}]}`)
	responses := render("/v1/responses", `{"instructions":"You edit \"files\".","input":[{"role":"user","content":"Go."},`+
		`{"type":"reasoning","summary":[]},
		{"type":"message","role":"assistant","content":[{"type":"output_text","text":"I read it."}]},
		{"type":"function_call","call_id":"c1","name":"read","arguments":"{\"path\":\"a\"}"},{"type":"function_call","call_id":"c2","name":"read","arguments":"{\"path\":\"b\"}"},
		{"type":"function_call_output","call_id":"c1","output":"one"},{"type":"function_call_output","call_id":"c2","output":"two"},
		{"type":"message","role":"user","content":[{"type":"input_text","text":"And?"}]}],
		"tools":[{"type":"function","name":"read","description":"Reads.","parameters":`+schema+`},{"type":"web_search"}]}`)
	if messages != chat {
		t.Errorf("Messages:\n%s\nchat:\n%s", messages, chat)
	}
	if responses != chat {
		t.Errorf("Responses:\n%s\nchat:\n%s", responses, chat)
	}
}
