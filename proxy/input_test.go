package proxy

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// refusal is an error of the proxy's own, as clients read it.
type refusal struct {
	Error struct {
		Message, Type, Src string
		Param, Code        *string
	}
}

func refused(t *testing.T, body string) refusal {
	t.Helper()
	var e refusal
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" || e.Error.Src != "warmroute" {
		t.Errorf("not an error of ours in OpenAI's shape: %.200q", body)
	}
	return e
}

func TestBadBodyIsRefusedBeforeAnyBackendIsAsked(t *testing.T) {
	const limit = 64 << 20
	chat := `{"model":"m","messages":[{"role":"user","content":"hi"}]`
	cases := []struct{ name, path, body, param, says string }{
		{"not JSON", "/v1/chat/completions", "hello", "", "JSON"},
		{"empty", "/v1/chat/completions", "", "", "empty"},
		{"white space", "/v1/chat/completions", " \n ", "", "empty"},
		{"a list", "/v1/chat/completions", "[]", "", "object"},
		{"cut-short JSON", "/v1/chat/completions", chat, "", ""},
		{"two values", "/v1/chat/completions", chat + "}{}", "", ""},
		{"no messages", "/v1/chat/completions", `{"model":"m"}`, "messages", "messages"},
		{"messages not a list", "/v1/chat/completions", `{"model":"m","messages":"hi"}`, "messages", "list"},
		{"64 MiB of [", "/v1/chat/completions", strings.Repeat("[", limit), "", "deep"},
		{`64 MiB of {"a":`, "/v1/chat/completions", strings.Repeat(`{"a":`, limit/5), "", "deep"},
		{"deep messages", "/v1/chat/completions", `{"messages":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + "}", "", "deep"},
		{"invalid UTF-8", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"` + "\xff\xfe" + `"}]}`, "", "UTF-8"},
		{"duplicate model", "/v1/chat/completions", `{"model":"m","model":"x","messages":[]}`, "model", "twice"},
		{"duplicate model, escaped", "/v1/chat/completions", `{"model":"m","\u006dodel":"x","messages":[]}`, "model", "twice"},
		{"duplicate messages", "/v1/chat/completions", `{"messages":[],"messages":[]}`, "messages", "twice"},
		{"number as model", "/v1/chat/completions", `{"model":7,"messages":[]}`, "model", "string"},
		{"control character in a string", "/v1/chat/completions", "{\"model\":\"m\x01\",\"messages\":[]}", "", ""},
		{"completions without a prompt", "/v1/completions", `{"model":"m"}`, "prompt", "prompt"},
		{"embeddings, not JSON", "/v1/embeddings", `{"model":`, "", ""},
		{"embeddings, number as model", "/v1/embeddings", `{"model":1,"input":"x"}`, "model", "string"},
		{"previous response", "/v1/responses", `{"model":"m","input":"hi","previous_response_id":"resp_1"}`, "previous_response_id", "previous_response_id"},
	}
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.BodyBytes = limit }, r)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			resp, answer := f.post(c.path, c.body)
			if resp.StatusCode != http.StatusBadRequest {
				t.Fatalf("status %d: %s", resp.StatusCode, answer)
			}
			e := refused(t, answer)
			if !strings.Contains(e.Error.Message, c.says) {
				t.Errorf("message %q does not say %q", e.Error.Message, c.says)
			}
			if c.param != "" && (e.Error.Param == nil || *e.Error.Param != c.param) {
				t.Errorf("param is not %s: %s", c.param, answer)
			}
			f.settled()
		})
	}
	if len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestBodyCutShortIsRefused(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	for name, request := range map[string]string{
		"length":                 fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(askWhole)+1, askWhole),
		"chunked":                "Transfer-Encoding: chunked\r\n\r\n" + chunk(askWhole),
		"chunked, broken":        "Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
		"length without a body":  "Content-Length: 10\r\n\r\n",
		"no length and no body":  "\r\n",
		"chunk longer than said": "Transfer-Encoding: chunked\r\n\r\n1\r\n" + askWhole + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := f.dial()
			io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"+request)
			c.CloseWrite()
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			if refused(t, string(body)); resp.StatusCode != http.StatusBadRequest {
				t.Errorf("status %d: %s", resp.StatusCode, body)
			}
		})
	}
	if len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestModels(t *testing.T) {
	base := &replica{models: []string{"base", "org/name", "lora<base"}, script: always(answered("200 OK", "first"))}
	other := &replica{models: []string{"other"}, script: always(answered("200 OK", "second"))}
	f := serve(t, nil, base, other)
	for _, c := range []struct {
		body   string
		status int
		answer string
	}{
		{`{"model":"base","messages":[]}`, 200, "first"},
		{`{"model":"org/name","messages":[]}`, 200, "first"},
		{`{"model":"lora","messages":[]}`, 200, "first"},
		{`{"model":"other","messages":[]}`, 200, "second"},
		{`{"messages":[]}`, 400, "several models"},
		{`{"model":"","messages":[]}`, 400, "several models"},
		{`{"model":null,"messages":[]}`, 400, "several models"},
		{`{"model":"none","messages":[]}`, 404, "base, org/name, lora, other"},
		{`{"model":"` + strings.Repeat("ü", 5000) + `","messages":[]}`, 404, "does not exist"},
		{`{"model":"\ud800","messages":[]}`, 404, "does not exist"},
	} {
		resp, answer := f.post("/v1/chat/completions", c.body)
		if resp.StatusCode != c.status || !strings.Contains(answer, c.answer) {
			t.Errorf("%.60s: got %d %.300s", c.body, resp.StatusCode, answer)
		}
		if c.status == 404 {
			e := refused(t, answer)
			if e.Error.Code == nil || *e.Error.Code != "model_not_found" || e.Error.Param == nil || *e.Error.Param != "model" || len(answer) > 1000 {
				t.Errorf("%.60s: got %.300s", c.body, answer)
			}
		}
	}
}

func TestOnlyBackendsThatListTheAdapterGetIt(t *testing.T) {
	without := &replica{models: []string{"base"}, script: always(answered("200 OK", "without"))}
	with := &replica{models: []string{"base", "lora<base"}, script: always(answered("200 OK", "with"))}
	dead := &replica{models: []string{"base", "lora<base"}, script: once()}
	f := serve(t, nil, without, dead, with)
	for range 3 {
		if _, got := f.post("/v1/chat/completions", `{"model":"lora","messages":[]}`); got != "with" {
			t.Errorf("answered by the replica %q the adapter", got)
		}
	}
	if len(without.requests()) != 0 {
		t.Error("a replica was asked for an adapter that it does not list")
	}
	if _, got := f.post("/v1/chat/completions", `{"messages":[]}`); got != "without" {
		t.Errorf("no model named: answered by %q", got)
	}
}

func TestModelThatNobodyListedYetIsA503(t *testing.T) {
	f := serve(t, nil, &replica{})
	f.backends[0].SetModels(nil)
	for _, body := range []string{askWhole, `{"messages":[]}`} {
		if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
	}
}
