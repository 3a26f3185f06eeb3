package prompt

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"
)

// hasTransferParams reports whether a value, read by encoding/json, has a transfer parameter that is not null.
// Outside of top, objects of the client do not count.
func hasTransferParams(d *json.Decoder, top bool) bool {
	found := false
	switch token, _ := d.Token(); token {
	case json.Delim('{'):
		for d.More() {
			key, _ := d.Token()
			name := key.(string)
			var member json.RawMessage
			if d.Decode(&member) != nil {
				return false
			}
			if slices.Contains(TransferParamNames[:], name) && string(member) != "null" {
				found = true
			}
			if !top || !hasArbitraryKeys([]byte(name)) {
				found = hasTransferParams(json.NewDecoder(bytes.NewReader(member)), false) || found
			}
		}
	case json.Delim('['):
		for d.More() {
			var element json.RawMessage
			if d.Decode(&element) != nil {
				return false
			}
			found = hasTransferParams(json.NewDecoder(bytes.NewReader(element)), false) || found
		}
	}
	return found
}

// TestTransferParamsOfClients expects that members of the client's own schemas, functions and metadata are not taken for
// parameters of the engine, but those of the engine's objects are.
func TestTransferParamsOfClients(t *testing.T) {
	for member, want := range map[string]string{
		`"guided_json":{"properties":{"kv_transfer_params":{"type":"object"}}}`:            "",
		`"functions":[{"name":"f","parameters":{"properties":{"ec_transfer_params":{}}}}]`: "",
		`"metadata":{"kv_transfer_params":"x"}`:                                            "",
		`"chat_template_kwargs":{"kv_transfer_params":"x"}`:                                "",
		`"documents":[{"kv_transfer_params":"x"}]`:                                         "",
		`"metadata":{"a":1},"kv_transfer_params":{"a":1}`:                                  "kv_transfer_params",
		`"vllm_xargs":{"metadata":{"kv_transfer_params":{"a":1}}}`:                         "kv_transfer_params",
		`"sampling_params":{"extra_args":{"ec_transfer_params":{"a":1}}}`:                  "ec_transfer_params",
	} {
		for kind, rest := range map[Kind]string{Chat: `"messages":[]`, Completion: `"prompt":"x"`, Messages: `"messages":[]`,
			Responses: `"input":"x"`} {
			var p Prompt
			if err := p.Parse(kind, []byte("{"+member+","+rest+"}")); err != nil || p.TransferParams != want {
				t.Errorf("kind %d with %s: found %q, want %q (%v)", kind, member, p.TransferParams, want, err)
			}
		}
	}
}

// FuzzTransferParams compares Parse with encoding/json.
func FuzzTransferParams(f *testing.F) {
	for _, body := range []string{
		`{"kv_transfer_params":{}}`, `{"kv_transfer_params":null}`, `{"ec_transfer_params" : "x"}`, `{"kv_transfer\u005fparams":1}`,
		`{"\u006bv_transfer_param\u0073":[]}`, `{"kv_transfer_params":null,"kv_transfer_params":0}`, `{"vllm_xargs":{"kv_transfer_params":"{}"}}`,
		`{"a":[{"b":{"ec_transfer_params":-1}}]}`, `{"tools":[{"kv_transfer_params":1}]}`,
		`{"tools":1,"messages":[{"role":"u","kv_transfer_params":1}],"a":{"kv_transfer_params":1}}`,
		`{"to\u006fls":[{"kv_transfer_params":1}]}`, `{"a":"kv_transfer_params"}`, `{"kv_transfer_params\u0000":1}`,
		`{"kv_transfer_param":1,"kv_transfer_paramss":1}`,
		"\xef\xbb\xbf{\"kv_transfer_params\":\n\ttrue}", `{"":{"":[{"kv_transfer_params":null},{"kv_transfer_params":{}}]}}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, kind := range []Kind{Other, Chat, Completion, Messages, Responses, Generate} {
			var p Prompt
			if p.Parse(kind, body) != nil {
				continue
			}
			d := json.NewDecoder(bytes.NewReader(bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))))
			if want := hasTransferParams(d, true); (p.TransferParams != "") != want {
				t.Fatalf("kind %d: found %q in %q, want %v", kind, p.TransferParams, body, want)
			}
		}
	})
}
