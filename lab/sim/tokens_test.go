package sim

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// generateBody is a request of token ids.
func generateBody(ids []uint32, more string) string {
	list, _ := json.Marshal(ids)
	return `{"token_ids":` + string(list) + `,"sampling_params":{"max_tokens":40,"ignore_eos":true}` + more + `}`
}

func manyTokens(n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(i * 7)
	}
	return ids
}

// Completions and token ids share the cache, and the next turn finds the response there.
func TestTokensAreCached(t *testing.T) {
	s := start(t, Config{Engine: fast})
	ids := manyTokens(320)
	list, _ := json.Marshal(ids)
	if status, got := post(t, s, "/v1/completions", `{"max_tokens":1,"prompt":`+string(list)+`}`); status != 200 {
		t.Fatalf("%d %s", status, got)
	}
	turn := func(ids []uint32, want int64) (output []uint32) {
		t.Helper()
		status, got := post(t, s, "/inference/v1/generate", generateBody(ids, ""))
		if cached := gjson.Get(got, "usage.prompt_tokens_details.cached_tokens").Int(); status != 200 || cached != want {
			t.Errorf("%d, %d tokens cached, want %d: %s", status, cached, want, got)
		}
		return tokenIDs(gjson.Get(got, "choices.0.token_ids"))
	}
	output := turn(ids, 304) // all but the last block
	if len(output) != 40 {
		t.Fatalf("%d tokens, want 40", len(output))
	}
	turn(append(ids, append(output, 1, 2, 3)...), 352) // the last token was not computed
}

func TestTokensStream(t *testing.T) {
	s := start(t, Config{Engine: fast})
	ids := manyTokens(20)
	_, whole := post(t, s, "/inference/v1/generate", generateBody(ids, ""))
	_, stream := post(t, s, "/inference/v1/generate", generateBody(ids, `,"stream":true,"stream_options":{"include_usage":true}`))
	var streamed []uint32
	events := strings.Split(strings.TrimSpace(stream), "\n\n")
	for _, e := range events {
		streamed = append(streamed, tokenIDs(gjson.Get(strings.TrimPrefix(e, "data: "), "choices.0.token_ids"))...)
	}
	if want := tokenIDs(gjson.Get(whole, "choices.0.token_ids")); fmt.Sprint(streamed) != fmt.Sprint(want) || len(want) != 40 {
		t.Errorf("streamed %v, want %v", streamed, want)
	}
	if n := len(events); events[n-1] != "data: [DONE]" || gjson.Get(events[n-2][6:], "usage.completion_tokens").Int() != 40 ||
		gjson.Get(events[n-3][6:], "choices.0.finish_reason").Str != "length" {
		t.Errorf("got %s", stream)
	}
	if gjson.Get(whole, "choices.0.finish_reason").Str != "length" || gjson.Get(whole, "usage.prompt_tokens").Int() != 20 ||
		gjson.Get(whole, "model").Str != "sim" {
		t.Errorf("got %s", whole)
	}
}

func TestTokensErrors(t *testing.T) {
	s := start(t, Config{Engine: fast})
	for body, want := range map[string]int{
		`{"token_ids":[1]}`:                                                                 400,
		`{"sampling_params":{}}`:                                                            400,
		`{"token_ids":[],"sampling_params":{}}`:                                             400,
		`{"token_ids":"x","sampling_params":{}}`:                                            400,
		`{"token_ids":[1],"sampling_params":[]}`:                                            400,
		`{"token_ids":[1],"sampling_params":{"n":100000}}`:                                  400,
		`{"token_ids":[1],"sampling_params":{"max_tokens":"x"}}`:                            400,
		`{"token_ids":[1],"sampling_params":{"max_tokens":0}}`:                              400,
		`{"token_ids":[1],"sampling_params":{},"model":"absent"}`:                           404,
		`{"token_ids":[1],"sampling_params":{"max_tokens":1},"stream":true,"cache_salt":7}`: 400,
	} {
		if status, got := post(t, s, "/inference/v1/generate", body); status != want || !gjson.Get(got, "error.message").Exists() {
			t.Errorf("%s: %d %s", body, status, got)
		}
	}
}

func TestWithout(t *testing.T) {
	s := start(t, Config{Engine: fast, Without: []string{"/v1/responses", "/inference/v1/generate"}})
	for path, want := range map[string]string{
		"/v1/responses":          `404 {"detail":"Not Found"}`,
		"/inference/v1/generate": `403 {"error":{"message":"Scale-out endpoints are disabled.`,
		"/v1/completions":        `200 `,
	} {
		if status, got := post(t, s, path, `{"prompt":"x","max_tokens":1}`); !strings.HasPrefix(fmt.Sprint(status, " ", got), want) {
			t.Errorf("%s: %d %s", path, status, got)
		}
	}
	if err := (Config{Without: []string{"v1/responses"}}).Validate(); err == nil {
		t.Error("a path without a slash is accepted")
	}
}

// FuzzTokensBody looks for bodies that crash the reading of a request of token ids.
func FuzzTokensBody(f *testing.F) {
	for _, body := range []string{
		generateBody([]uint32{1, 2}, ""), `{"token_ids":[-1,1e30,"x",null],"sampling_params":{"n":1.5,"max_tokens":"7"}}`,
		`{"token_ids":[[1]],"sampling_params":{"temperature":{}},"stream":true,"stream_options":{"include_usage":1}}`,
		`{"token_ids":{},"sampling_params":0}`,
	} {
		f.Add([]byte(body))
	}
	s := NewServer(Config{})
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest("POST", "/inference/v1/generate", strings.NewReader(string(body)))
		r.Header.Set("Content-Type", "application/json")
		in, err := readBody(r)
		if err != nil {
			return
		}
		if p, tokens, err := s.readTokenParams(in); err == nil && (len(tokens) == 0 || p.n < 1 || p.n > s.cfg.Engine.MaxSeqs) {
			t.Errorf("%d tokens, n %d", len(tokens), p.n)
		}
	})
}
