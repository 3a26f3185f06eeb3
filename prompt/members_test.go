package prompt

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

func edited(t testing.TB, c *Changes, kind Kind, body string) string {
	t.Helper()
	edits, err := c.AppendEdits(nil, kind, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	out := AppendEdited(nil, []byte(body), edits)
	if len(out) != EditedLength([]byte(body), edits) {
		t.Errorf("%s: EditedLength is %d of %d", body, EditedLength([]byte(body), edits), len(out))
	}
	return string(out)
}

func TestChanges(t *testing.T) {
	set := []Member{{"model", `"b"`}, {"temperature", "0.2"}, {"chat_template_kwargs", `{"enableThinking":false}`}}
	for _, c := range []struct {
		name, body, want string
		kind             Kind
		changes          Changes
	}{
		{"in place", ` { "a" : [1 , 2], "model" : "x" } `, ` { "a" : [1 , 2], "model" : "b" } `, Chat, Changes{Set: set[:1]}},
		{"missing", ` {"model":"x" ,"z":{"model":"x"}}`, ` {"temperature":0.2,"model":"b" ,"z":{"model":"x"}}`, Chat, Changes{Set: set[:2]}},
		{"twice", `{"temperature":1,"model":"x","temperature":null}`, `{"temperature":0.2,"model":"b","temperature":0.2}`, Chat,
			Changes{Set: set[:2]}},
		{"escaped", `{"mod\u0065l":"x"}`, `{"mod\u0065l":"b"}`, Chat, Changes{Set: set[:1]}},
		{"whole value", `{"model":"","chat_template_kwargs":{"a":1},"temperature":[0]}`,
			`{"model":"b","chat_template_kwargs":{"enableThinking":false},"temperature":0.2}`, Chat, Changes{Set: set}},
		{"empty", "\xef\xbb\xbf{ }", "\xef\xbb\xbf{\"model\":\"b\",\"temperature\":0.2 }", Other, Changes{Set: set[:2]}},
	} {
		if got := edited(t, &c.changes, c.kind, c.body); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
	for _, body := range []string{"", "[]", "1", `{"a":1`, `{"a":1}x`, `{"a"}`} {
		if edits, err := (&Changes{Set: set}).AppendEdits(nil, Chat, []byte(body)); err == nil || len(edits) > 0 {
			t.Errorf("%q: no error, %v", body, edits)
		}
	}
}

func TestOutputLimit(t *testing.T) {
	for _, c := range []struct {
		kind       Kind
		body, want string
	}{
		{Chat, `{"max_tokens":101}`, `{"max_tokens":100}`},
		{Chat, `{"max_tokens":100,"max_completion_tokens":1e9}`, `{"max_tokens":100,"max_completion_tokens":100}`},
		{Chat, `{"max_tokens":7,"max_completion_tokens":null}`, `{"max_tokens":7,"max_completion_tokens":null}`},
		{Chat, `{"max_tokens":null,"max_completion_tokens":null}`, `{"max_tokens":null,"max_completion_tokens":100}`},
		{Chat, `{"a":1,"max_output_tokens":500}`, `{"max_completion_tokens":100,"a":1,"max_output_tokens":500}`},
		{Chat, `{"max_tokens":"500"}`, `{"max_tokens":100}`},
		{Chat, `{"max_tokens":" 5_0_0 "}`, `{"max_tokens":100}`},
		{Chat, `{"max_tokens":"99"}`, `{"max_tokens":"99"}`},
		{Chat, `{"max_tokens":"nan"}`, `{"max_tokens":100}`},
		{Chat, `{"max_tokens":-1}`, `{"max_tokens":-1}`},
		{Chat, `{"max_tokens":1e400}`, `{"max_tokens":100}`},
		{Chat, `{"max_tokens":[500]}`, `{"max_tokens":[500]}`},
		{Completion, `{"max_tokens":500}`, `{"max_tokens":100}`},
		{Completion, `{}`, `{"max_tokens":16}`},
		{Completion, `{"max_tokens":null}`, `{"max_tokens":16}`},
		{Messages, `{"max_tokens":500,"a":1}`, `{"max_tokens":100,"a":1}`},
		{Messages, `{"a":1}`, `{"max_tokens":100,"a":1}`},
		{Responses, `{"max_output_tokens":500,"max_tokens":500}`, `{"max_output_tokens":100,"max_tokens":500}`},
		{Responses, `{"input":""}`, `{"max_output_tokens":100,"input":""}`},
		{Generate, `{"max_tokens":500,"sampling_params":{"n":1,"max_tokens":500}}`,
			`{"max_tokens":500,"sampling_params":{"n":1,"max_tokens":100}}`},
		{Generate, `{"sampling_params":{"n":1,"max_tokens":null},"max_tokens":500}`,
			`{"sampling_params":{"n":1,"max_tokens":100},"max_tokens":500}`},
		{Generate, `{"sampling_params":{ }}`, `{"sampling_params":{"max_tokens":100 }}`},
		{Generate, `{"sampling_params":{"n":1}}`, `{"sampling_params":{"max_tokens":100,"n":1}}`},
		{Generate, `{"sampling_params":null}`, `{"sampling_params":null}`},
		{Other, `{"max_tokens":500}`, `{"max_tokens":500}`},
	} {
		if got := edited(t, &Changes{MaxOutputTokens: 100}, c.kind, c.body); got != c.want {
			t.Errorf("kind %d, %s: got %s, want %s", c.kind, c.body, got, c.want)
		}
	}
	if got := edited(t, &Changes{MaxOutputTokens: 9}, Completion, `{}`); got != `{"max_tokens":9}` {
		t.Errorf("got %s", got)
	}
}

// FuzzChanges checks that a changed body is, as JSON, the given one with its members set, also where one is given several times,
// that it is within the maximum of output tokens, and that nothing else of its bytes is changed.
func FuzzChanges(f *testing.F) {
	for _, body := range []string{
		pythonRequests, pythonOpenAI, nodeOpenAI, php, "{}", "\xef\xbb\xbf { } ", `{"model":1,"mod\u0065l":[{}],"a":{"model":1}}`,
		`{"max_tokens":500,"max_tokens":null}`, `{"sampling_params":{"max_tokens":1,"max_tokens":1e3},"sampling_params":{}}`,
		`{"max_output_tokens":"9","max_completion_tokens":101}`,
	} {
		for kind := range Kind(numKinds) {
			f.Add([]byte(body), byte(kind), "temperature", `{"a":[1, 2]}`)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, kind byte, name, value string) {
		k := Kind(kind % numKinds)
		var p Prompt
		value = strings.TrimSpace(value) // settings have none around a value
		if p.Parse(k, body) != nil || !json.Valid([]byte(value)) || !utf8.ValidString(name+value) || name == "model" {
			return
		}
		for _, limit := range OutputLimitNames {
			if name == limit {
				return
			}
		}
		const most = 100
		c := Changes{Set: []Member{{"model", `"b"`}, {name, value}}, MaxOutputTokens: most}
		edits, err := c.AppendEdits(nil, k, body)
		if err != nil {
			t.Fatal(err)
		}
		out := AppendEdited(nil, body, edits)
		var before, after map[string]json.RawMessage
		object := bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
		if json.Unmarshal(object, &before) != nil { // deeper than encoding/json reads
			return
		}
		if err := json.Unmarshal(bytes.TrimPrefix(out, []byte("\xef\xbb\xbf")), &after); err != nil {
			t.Fatalf("%s became %s: %v", body, out, err)
		}
		limits := map[string]bool{"sampling_params": k == Generate}
		for _, limit := range outputLimits[k] {
			limits[limit] = limits[limit] || k != Generate
		}
		want := map[string]json.RawMessage{}
		for key, v := range before {
			want[key] = v
		}
		want["model"] = json.RawMessage(`"b"`)
		want[unescaped(name)] = json.RawMessage(value)
		for key := range after {
			if limits[key] && key != name {
				checkOutputLimit(t, k, key, after[key], most)
				delete(want, key)
				continue
			}
			if string(after[key]) != string(want[key]) && !equalJSON(after[key], want[key]) {
				t.Errorf("%s became %s: %q is %s, want %s", body, out, key, after[key], want[key])
			}
			delete(want, key)
		}
		if len(want) > 0 {
			t.Errorf("%s became %s: without %v", body, out, want)
		}
		// What is between the edits is what was there, and an edit replaces a whole value or inserts at the beginning of an object.
		for i, e := range edits {
			if e.Start > e.End || i > 0 && e.Start < edits[i-1].End {
				t.Fatalf("edits %v of %s are not in order", edits, body)
			}
			if e.Start < e.End && !json.Valid(body[e.Start:e.End]) {
				t.Errorf("%s: an edit replaces %q, which is not a JSON value", body, body[e.Start:e.End])
			}
			if e.Start == e.End && body[e.Start-1] != '{' {
				t.Errorf("%s: an edit inserts after %q", body, body[:e.Start])
			}
		}
		if again := edited(t, &c, k, string(out)); again != string(out) {
			t.Errorf("%s became %s, and that %s", body, out, again)
		}
		var second Prompt
		if err := second.Parse(k, out); err != nil && !strings.Contains(err.Error(), "must be a string") && name == "temperature" {
			t.Errorf("%s became %s: %v", body, out, err)
		}
	})
}

// unescaped returns a member's name as encoding/json reads it.
func unescaped(name string) string {
	quoted, _ := json.Marshal(name)
	_ = json.Unmarshal(quoted, &name)
	return name
}

func equalJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// checkOutputLimit checks the last value of a member that limits output tokens.
func checkOutputLimit(t *testing.T, kind Kind, key string, value []byte, most float64) {
	t.Helper()
	if kind == Generate {
		var params map[string]json.RawMessage
		if json.Unmarshal(value, &params) == nil && params != nil {
			checkOutputLimit(t, Chat, "max_tokens", params["max_tokens"], most)
		}
		return
	}
	var number float64
	var text string
	switch {
	case json.Unmarshal(value, &text) == nil:
		number, _ = strconv.ParseFloat(text, 64)
	case json.Unmarshal(value, &number) != nil:
		return
	}
	if number > most || math.IsNaN(number) {
		t.Errorf("%s is %s", key, value)
	}
}
