package prompt

import (
	"bytes"
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestSplittable(t *testing.T) {
	const chat, completion, messages, responses = `"messages":[{"role":"user","content":"a"}]`, `"prompt":"a"`,
		`"messages":[{"role":"user","content":"a"}]`, `"input":"a"`
	for _, c := range []struct {
		kind Kind
		body string
		want bool
	}{
		{Chat, chat, true}, {Completion, completion, true}, {Messages, messages, true}, {Responses, responses, true},
		{Generate, `"token_ids":[1]`, false}, {Other, `"input":"a"`, false},
		{Chat, chat + `,"n":1,"best_of":null,"stream":true,"max_tokens":5,"logprobs":true,"use_beam_search":false,"tools":[{"type":"function",` +
			`"function":{"name":"f"}}]`, true},
		{Chat, chat + `,"n":2`, false}, {Completion, completion + `,"best_of":"3"`, false}, {Chat, chat + `,"n":null`, true},
		{Chat, chat + `,"use_beam_search":true`, false}, {Chat, chat + `,"use_beam\u005fsearch":1`, false},
		{Completion, completion + `,"use_beam_search":null`, true},
		{Chat, chat + `,"prompt_logprobs":0`, false}, {Completion, completion + `,"prompt_logprobs":null`, true},
		{Completion, `"prompt":["a"]`, true}, {Completion, `"prompt":["a","b"]`, false}, {Completion, `"prompt":[1,2]`, true},
		{Completion, `"prompt":[[1],[2]]`, false},
		{Completion, completion + `,"echo":true`, false}, {Completion, completion + `,"truncate_prompt_tokens":5`, false},
		{Completion, completion + `,"prompt_embeds":"a"`, false},
		{Chat, chat + `,"kv_transfer_params":null`, false}, {Chat, chat + `,"ec_transfer_params":null`, false},
		{Chat, chat + `,"kv_transfer\u005fparams":{}`, false},
		{Chat, chat + `,"vllm_xargs":{"kv_transfer_params":{}}`, false},
		{Chat, `"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]`, false},
		{Messages, `"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"u"}}]}]`, false},
		{Responses, `"input":[{"role":"user","content":[{"type":"input_image","image_url":"u"}]}]`, false},
		{Responses, responses + `,"background":true`, false}, {Responses, responses + `,"background":false,"store":true`, true},
		{Responses, responses + `,"previous_response_id":"r"`, false},
		{Responses, responses + `,"tools":[{"type":"function","name":"f"},{"type":"custom","name":"g"}]`, true},
		{Responses, responses + `,"tools":[{"type":"function","name":"f"},{"type":"mcp","server_label":"s"}]`, false},
		{Chat, chat + strings.Repeat(`,"min_tokens":1`, maxEdits), true}, {Chat, chat + strings.Repeat(`,"min_tokens":1`, maxEdits+1), false},
	} {
		var p Prompt
		for range 2 { // the second time tools are known
			if err := p.Parse(c.kind, []byte("{"+c.body+"}")); err != nil {
				t.Fatal(err)
			}
			if got := p.Splittable(); got != c.want {
				t.Errorf("kind %d, %.200s: got %v", c.kind, c.body, got)
			}
		}
	}
}

func TestPrefillEdits(t *testing.T) {
	for _, c := range []struct {
		kind       Kind
		body, want string // without kv_transfer_params
	}{
		{Chat, `{"messages":[],"stream" : true ,"stream_options":{"include_usage":true},"max_tokens":null,"min_tokens":5,"n":1}`,
			`{"messages":[],"stream" : false ,"stream_options":null,"max_tokens":1,"min_tokens":0,"n":1}`},
		{Chat, "\xef\xbb\xbf \n{ \"max_completion_tokens\":7,\"messages\":[]}",
			"\xef\xbb\xbf \n{\"max_tokens\":1, \"max_completion_tokens\":1,\"messages\":[]}"},
		{Chat, `{"m\u0061x_tokens":20,"str\u0065am":true,"messages":[{"max_tokens":3,"stream":true}]}`,
			`{"m\u0061x_tokens":1,"str\u0065am":false,"messages":[{"max_tokens":3,"stream":true}]}`},
		{Chat, `{"min_tokens":1,"messages":[],"min_tokens":2}`, `{"max_tokens":1,"min_tokens":0,"messages":[],"min_tokens":0}`},
		{Completion, `{"prompt":"{\"stream\":true"}`, `{"max_tokens":1,"prompt":"{\"stream\":true"}`},
		{Messages, `{"max_tokens":1024,"messages":[],"stream":true}`, `{"max_tokens":1,"messages":[],"stream":false}`},
		{Responses, `{"input":"a","store":true}`, `{"max_output_tokens":1,"input":"a","store":false}`},
		{Responses, `{"input":"a","max_output_tokens":9}`, `{"store":false,"input":"a","max_output_tokens":1}`},
	} {
		var p Prompt
		if err := p.Parse(c.kind, []byte(c.body)); err != nil {
			t.Fatal(err)
		}
		got := string(AppendEdited(nil, []byte(c.body), p.AppendPrefillEdits(nil)))
		if strings.Count(got, remoteDecode) != 1 || strings.Replace(got, remoteDecode, "", 1) != c.want {
			t.Errorf("kind %d, %s:\ngot  %s\nwant %s", c.kind, c.body, got, c.want)
		}
	}
}

// FuzzPrefillEdits checks that the edits change the members that they are to change, and nothing else.
func FuzzPrefillEdits(f *testing.F) {
	for _, body := range []string{
		`{"messages":[],"stream":true,"max_tokens":5}`, `{"prompt":"a","min_tokens":1,"min_tokens":2,"stream_options":{}}`,
		"\xef\xbb\xbf{\"input\":\"a\" , \"st\\u006fre\":true}",
		`{"messages":[{"role":"user","content":"a"}],"max_completion_tokens":"7","x":{"stream":true}}`, `{"input":[],"max_output_tokens":null}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, kind := range []Kind{Chat, Completion, Messages, Responses} {
			var p Prompt
			if p.Parse(kind, body) != nil || !p.Splittable() {
				continue
			}
			object := bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
			edited := bytes.TrimPrefix(AppendEdited(nil, body, p.AppendPrefillEdits(nil)), []byte("\xef\xbb\xbf"))
			want, got := map[string]json.RawMessage{}, map[string]json.RawMessage{}
			if err := json.Unmarshal(object, &want); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(edited, &got); err != nil {
				t.Fatalf("%q became %q: %v", body, edited, err)
			}
			for name := range want {
				if use := memberUseOf([]byte(name)); use != useNone && use < forbidTrue {
					want[name] = json.RawMessage(prefillValues[use])
				}
			}
			limit := "max_tokens"
			if kind == Responses {
				limit = "max_output_tokens"
				want["store"] = json.RawMessage("false")
			}
			want[limit] = json.RawMessage("1")
			params := got["kv_transfer_params"]
			delete(got, "kv_transfer_params")
			if !json.Valid(params) || !maps.EqualFunc(want, got, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
				t.Fatalf("%q became %q", body, edited)
			}
			inserted := AppendEdited(nil, body, []Edit{{p.MembersAt(), p.MembersAt(), `"kv_transfer_params":{},`}})
			if !utf8.Valid(inserted) || p.Parse(kind, inserted) != nil || p.TransferParams != "kv_transfer_params" {
				t.Fatalf("%q became %q", body, inserted)
			}
		}
	})
}
