package vllm

import (
	"bytes"
	"encoding/json"
	"testing"
)

// FuzzModels checks what every reader of a list relies on, whatever a replica writes.
func FuzzModels(f *testing.F) {
	for _, seed := range []string{
		vllmModels("1", "p", `"id":"m","root":"/m","parent":null,"max_model_len":10`, `"id":"a","parent":"m"`),
		`{"data":[{"id":"m"},{"id":"m"}]}`, `{"data":[{"ID":"M","Id":"n"}]}`, `{"data":null}`, `{"data":[null]}`, `{"data":[{"id":"\ud800\u0000"}]}`,
		`{"data":[{"id":"m","max_model_len":1e999}]}`, `{"data":[{"id":"m","max_model_len":"9"}]} x`, `[]`, ``, "{\"data\":[{\"id\":\"\xff\"}]}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		models, err := ParseModels(body)
		if err != nil {
			if models != nil {
				t.Errorf("models %v beside the error %v", models, err)
			}
			return
		}
		if len(models) > maxModels {
			t.Errorf("%d models", len(models))
		}
		for _, m := range models {
			if m.ID == "" || len(m.ID) > maxModelIDBytes || m.MaxTokens < 0 || m.MaxTokens > maxCount {
				t.Errorf("%+v", m)
			}
			if !json.Valid(m.Card) || !bytes.Contains(body, m.Card) {
				t.Errorf("card %q is not what the replica wrote", m.Card)
			}
			again, err := parseCard(m.Card)
			if err != nil || !EqualModels([]Model{m}, []Model{again}) {
				t.Errorf("read again, %q is another: %+v, %v", m.Card, again, err)
			}
		}
	})
}
