package proxy

import (
	"bytes"
	"encoding/json"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"warmroute/prompt"
	"warmroute/proxy/api"
	"warmroute/proxy/relay"
)

// withMember returns a JSON object with one more member.
func withMember(object, member string) string {
	return strings.TrimSuffix(object, "}") + "," + member + "}"
}

func TestTransferParamsRefused(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	const kv, ec = "kv_transfer_params", "ec_transfer_params"
	for _, path := range f.proxy.jsonEndpoints() {
		for member, field := range map[string]string{
			`"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[]]}`: kv,
			`"ec_transfer_params":{"a":{}}`:                                           ec,
			`"kv_transfer_params":{}`:                                                 kv,
			`"kv_transfer_params":"{}"`:                                               kv,
			`"kv_transfer\u005fparams":{"a":1}`:                                       kv,
			`"\u006b\u0076_transfer_params" : {"a":1}`:                                kv,
			`"kv_transfer_params":null,"kv_transfer_params":{"a":1}`:                  kv,
			`"kv_transfer_params":{"a":1},"kv_transfer_params":null`:                  kv,
			`"vllm_xargs":{"kv_transfer_params":{"a":1}}`:                             kv,
			`"vllm_xargs":{"x":1,"ec_transfer_param\u0073":"{}"}`:                     ec,
			`"sampling_params":{"extra_args":{"kv_transfer_params":{"a":1}}}`:         kv,
			`"extra_args":[{"kv_transfer_params":{"a":1}}]`:                           kv,
		} {
			body := bodyFor(path)
			if path == "/inference/v1/generate" {
				body = `{"model":"m","token_ids":[1]}`
			}
			resp, answer := f.post(path, withMember(body, member))
			if resp.StatusCode != http.StatusBadRequest || !strings.Contains(answer, field) ||
				!strings.Contains(answer, "limits.kv_transfer_params") {
				t.Errorf("%s with %s: got %d %s", path, member, resp.StatusCode, answer)
			}
			if api.DialectOf(path) == api.OpenAI {
				refused(t, answer)
			}
		}
	}
	for path, body := range map[string]string{
		"/v1/chat/completions": "\xef\xbb\xbf" + withMember(askWhole, `"kv_transfer_params":{"a":1}`),
		"/v1/completions": "\xff\xfe" + strings.Join(strings.Split(withMember(bodyFor("/v1/completions"), `"kv_transfer_params":{"a":1}`),
			""), "\x00") + "\x00",
		"/v1/embeddings": strings.Join(strings.Split(withMember(bodyFor("/v1/embeddings"), `"kv_transfer_params":{"a":1}`), ""), "\x00") +
			"\x00",
		"/v1/responses/a/cancel": `{"kv_transfer_params":{"a":1}}`,
	} {
		if resp, answer := f.post(path, body); resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%s with %q: got %d %s", path, body, resp.StatusCode, answer)
		}
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}

func TestTransferParamsOfForms(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	for xargs, status := range map[string]int{
		`{"kv_transfer_params":"x"}`:                400,
		`{"a":1,"ec_transfer\u005fparams":{"b":2}}`: 400,
		`{"a":NaN,"kv_transfer_params":"x"}`:        400,
		`{"kv_transfer_params":null}`:               200,
		`{"a":1}`:                                   200,
		"":                                          200,
	} {
		kind, body := upload(t, "model", "m", "vllm_xargs", xargs)
		if resp, answer, err := f.upload("/v1/audio/transcriptions", kind, body); err != nil || resp.StatusCode != status {
			t.Errorf("%s: got %v %s, want %d", xargs, resp, answer, status)
		}
	}
	kind, body := upload(t, "vllm_xargs", `{"a":1}`, "vllm_xargs", `{"kv_transfer_params":"x"}`)
	if resp, answer, err := f.upload("/v1/audio/translations", kind, body); err != nil || resp.StatusCode != 400 ||
		!strings.Contains(answer, `"param":"vllm_xargs"`) {
		t.Errorf("twice: got %v %s", resp, answer)
	}
}

func TestTransferParamsPassed(t *testing.T) {
	r := &replica{script: always(answered("200 OK", `{"kv_transfer_params":{"remote_host":"10.0.0.1"}}`))}
	f := serve(t, func(o *Options) { o.KVTransferParams = AllowTransferParams }, r)
	body := withMember(askWhole, `"kv_transfer_params":{"do_remote_decode":true},"vllm_xargs":{"ec_transfer_params":"x"}`)
	if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusOK || !strings.Contains(answer, "10.0.0.1") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if r.requests()[0].body != body {
		t.Error("the body was changed")
	}
}

// A client's own data may have such keys, and null is allowed.
func TestTransferParamsOfClientData(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", "{}"))})
	for _, member := range []string{
		`"kv_transfer_params":null`, `"vllm_xargs":{"ec_transfer_params": null}`, `"KV_transfer_params":1`, `"kv_transfer_params ":1`,
		`"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"kv_transfer_params":{"type":"object"}}}}}]`,
		`"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"kv_transfer_params":{}}}}}`,
		`"user":"\"kv_transfer_params\":{\"a\":1}"`,
	} {
		if resp, answer := f.post("/v1/chat/completions", withMember(askWhole, member)); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: got %d %s", member, resp.StatusCode, answer)
		}
	}
}

func TestTransferParamsRemovedFromResponses(t *testing.T) {
	t.Parallel()
	const params = `{"remote_host":"10.0.0.1","remote_block_ids":[[1,2]],"a":{"b":"}\"\\"}}`
	blank := "null" + strings.Repeat(" ", len(params)-len("null"))
	long := strings.Repeat("x", 3*relay.ChunkBytes)
	for name, c := range map[string]struct{ path, body, answer string }{
		"chat":      {"/v1/chat/completions", askWhole, withMember(whole, `"kv_transfer_params":`+params+`,"ec_transfer_params":`+params)},
		"first":     {"/v1/completions", bodyFor("/v1/completions"), `{"kv_transfer_params" : ` + params + `,"choices":[{}]}`},
		"null":      {"/v1/chat/completions", askWhole, withMember(whole, `"kv_transfer_params":null,"ec_transfer_params":null`)},
		"empty":     {"/v1/chat/completions", askWhole, withMember(whole, `"kv_transfer_params":{},"ec_transfer_params": { }`)},
		"in a text": {"/v1/chat/completions", askWhole, withMember(whole, `"a":"\"kv_transfer_params\":{\"remote_host\":\"h\"}"`)},
		"very long": {"/v1/embeddings", bodyFor("/v1/embeddings"), `{"data":"` + strings.Repeat("y", 2*relay.MaxBufferedBytes) +
			`","kv_transfer_params":` + params + `}`},
		"embeddings": {"/v1/embeddings", bodyFor("/v1/embeddings"), `{"data":[],"kv_transfer_params":` + params + `}`},
		"deeper": {"/v1/responses", bodyFor("/v1/responses"),
			`{"status":"completed","output":[{"type":"message"}],"response":{"kv_transfer_params":` + params + `}}`},
		"error": {"/v1/chat/completions", askWhole, `{"error":{"message":"m"},"kv_transfer_params":` + params + `}`},
	} {
		t.Run(name, func(t *testing.T) {
			status := "200 OK"
			if name == "error" {
				status = "400 Bad Request"
			}
			f := serve(t, nil, &replica{script: always(answered(status, c.answer))})
			resp, got := f.post(c.path, c.body)
			if want := strings.ReplaceAll(c.answer, params, blank); got != want || resp.Header.Get("Content-Length") != strconv.Itoa(len(want)) {
				t.Errorf("got %.300q, want %.300q", got, want)
			}
		})
	}
	for name, c := range map[string]struct{ path, body, event string }{
		"chat": {"/v1/chat/completions", askStream, `data: {"choices":[],"kv_transfer_params":` + params + "}\n\n"},
		"long": {"/v1/chat/completions", askStream, `data: {"a":"` + long + `","kv_transfer_params":` + params + `,"b":"` + long +
			`"}` + "\n\n"},
		"longer than a chunk": {"/v1/chat/completions", askStream, `data: {"kv_transfer_params":{"a":"` + long + `"}}` + "\n\n"},
		"null":                {"/v1/chat/completions", askStream, `data: {"choices":[],"kv_transfer_params":null}` + "\n\n"},
		"a text":              {"/v1/chat/completions", askStream, `data: {"choices":[],"a":"\"kv_transfer_params\":{}"}` + "\n\n"},
	} {
		t.Run("stream "+name, func(t *testing.T) {
			events := hello + c.event + stop + doneLine
			want := strings.ReplaceAll(events, params, blank)
			if name == "longer than a chunk" {
				object := `{"a":"` + long + `"}`
				want = strings.ReplaceAll(events, object, "null"+strings.Repeat(" ", len(object)-len("null")))
			}
			for _, size := range []int{len(events), 1000, 7, 1} {
				var parts []string
				for rest := events; rest != ""; {
					n := min(size, len(rest))
					parts, rest = append(parts, rest[:n]), rest[n:]
				}
				if size < 1000 && len(events) > 2*relay.ChunkBytes {
					continue
				}
				f := serve(t, nil, &replica{script: always(streamed(parts...))})
				if _, got := f.post(c.path, c.body); got != want {
					t.Errorf("in pieces of %d: got %.500q, want %.500q", size, got, want)
				}
			}
		})
	}
}

// FuzzTransferParamsBlanker compares the blanking of a response in pieces with that in one piece.
func FuzzTransferParamsBlanker(f *testing.F) {
	for _, s := range []string{
		`{"kv_transfer_params":{"a":{"b":"}\""}},"c":1}`, `{"x":[{"ec_transfer_params" : {}}]}`, `"\"kv_transfer_params":{`,
		`{"kv_transfer_params":null}`, `{"kv_transfer_params":{ "a":1}}`, `"kv_transfer_params""kv_transfer_params":{"a":1}`,
		"{\"kv_transfer_params\"\n:\t{\n}}",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, response []byte, size uint8) {
		blank := func(size int) string {
			var b relay.TransferParamsBlanker
			var out []byte
			for rest := response; len(rest) > 0; {
				n := min(size, len(rest))
				out = append(out, b.Blank(bytes.Clone(rest[:n]))...)
				rest = rest[n:]
			}
			return string(append(out, b.Undecided...))
		}
		all := blank(len(response) + 1)
		if pieces := blank(int(size) + 1); pieces != all {
			t.Fatalf("in pieces %q, in one %q", pieces, all)
		}
		if len(all) != len(response) {
			t.Fatalf("%q became %q", response, all)
		}
		checkBlanked(t, response, []byte(all))
	})
}

// checkBlanked checks that a response in JSON differs from its original only by the objects that are to be overwritten.
func checkBlanked(t *testing.T, original, blanked []byte) {
	var a, b any
	if bytes.ContainsRune(original, '\\') && bytes.Contains(original, []byte(`\u`)) || json.Unmarshal(original, &a) != nil {
		return
	}
	if err := json.Unmarshal(blanked, &b); err != nil {
		t.Fatalf("%q became %q: %v", original, blanked, err)
	}
	gap := regexp.MustCompile(`[ \t\r\n]{8}`)
	if gap.Match(original) {
		return
	}
	if want := removeObjects(a); !reflect.DeepEqual(want, removeObjects(b)) || !reflect.DeepEqual(want, b) {
		t.Fatalf("%q became %q", original, blanked)
	}
}

// removeObjects sets the objects of transfer parameters in a decoded value to nil, unless they are empty.
func removeObjects(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, member := range v {
			if object, ok := member.(map[string]any); ok && len(object) > 0 && slices.Contains(prompt.TransferParamNames[:], key) {
				v[key] = nil
			} else {
				v[key] = removeObjects(member)
			}
		}
	case []any:
		for i := range v {
			v[i] = removeObjects(v[i])
		}
	}
	return v
}
