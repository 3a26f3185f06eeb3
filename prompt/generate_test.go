package prompt

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
)

// idsJSON returns n token ids from first on as JSON.
func idsJSON(first, n int) string {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = first + i
	}
	b, _ := json.Marshal(ids)
	return string(b)
}

func TestTokenIDsShareBlocks(t *testing.T) {
	ids := idsJSON(1000, 64)
	_, want := blocksOf(t, Generate, []byte(`{"token_ids":`+ids+`,"sampling_params":{}}`), 64)
	if len(want) != 4 {
		t.Fatalf("%d blocks of 64 ids, want 4", len(want))
	}
	for _, c := range []struct {
		name string
		kind Kind
		body string
		same bool
	}{
		{"completion", Completion, `{"prompt":` + ids + `}`, true},
		{"list of one", Completion, `{"prompt":[` + ids + `]}`, true},
		{"first of a list", Completion, `{"prompt":[` + ids + `,[7,8,9]]}`, true},
		{"flag for texts", Completion, `{"prompt":` + ids + `,"add_special_tokens":false}`, true},
		{"sampling parameters", Generate, `{"sampling_params":{"temperature":0.5,"max_tokens":9},"token_ids":` + ids + `,"stream":true}`, true},
		{"no media", Generate, `{"token_ids":` + ids + `,"features":null,"content_parts":null}`, true},
		{"salt", Generate, `{"token_ids":` + ids + `,"cache_salt":"s"}`, false},
		{"media", Generate, `{"token_ids":` + ids + `,"features":{"mm_hashes":{"image":["a"]}}}`, false},
		{"media to be fetched", Generate, `{"token_ids":` + ids + `,"content_parts":[{"type":"image_url","url":"x"}]}`, false},
		{"other ids", Generate, `{"token_ids":` + idsJSON(1001, 64) + `}`, false},
		{"text", Completion, `{"prompt":"a text"}`, false},
	} {
		if _, got := blocksOf(t, c.kind, []byte(c.body), 64); slices.Equal(got, want) != c.same {
			t.Errorf("%s: the blocks are the same: %v, want %v", c.name, !c.same, c.same)
		}
	}
	salted := func(kind Kind, key string) []Block {
		_, blocks := blocksOf(t, kind, fmt.Appendf(nil, `{%q:%s,"cache_salt":"s"}`, key, ids), 64)
		return blocks
	}
	if !slices.Equal(salted(Completion, "prompt"), salted(Generate, "token_ids")) {
		t.Error("the same salt makes different blocks")
	}
	media := func(data string) []Block {
		_, blocks := blocksOf(t, Generate, []byte(`{"token_ids":`+ids+`,"features":{"kwargs_data":`+data+`,"mm_hashes":{"image":["a"]},`+
			`"mm_placeholders":{}}}`), 64)
		return blocks
	}
	if !slices.Equal(media(`{"image":["AAAA"]}`), media("null")) {
		t.Error("the data of media counts, not only their hashes")
	}
}

func TestGenerateFields(t *testing.T) {
	for _, c := range []struct {
		body       string
		max, n     int
		cacheable  bool
		media      bool
		stream     bool
		firstError string // parameter
	}{
		{body: `{"token_ids":[1,2],"sampling_params":{"max_tokens":7}}`, max: 7, n: 1, cacheable: true},
		{body: `{"sampling_params":{"n":3,"max_tokens":"8"},"stream":true,"token_ids":[1]}`, max: 8, n: 3, cacheable: true, stream: true},
		{body: `{"token_ids":[1],"max_tokens":5,"n":4}`, n: 1, cacheable: true}, // not members of this endpoint
		{body: `{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`, n: 1},
		{body: `{"token_ids":[1],"sampling_params":{"prompt_logprob_token_ids":[[1]]}}`, n: 1},
		{body: `{"token_ids":[1],"sampling_params":{"skip_reading_prefix_cache":true}}`, n: 1},
		{body: `{"token_ids":[1],"sampling_params":{"skip_reading_prefix_cache":false,"prompt_logprobs":null}}`, n: 1, cacheable: true},
		{body: `{"token_ids":[1],"sampling_params":null}`, n: 1, cacheable: true},
		{body: `{"token_ids":[1],"features":{"mm_hashes":{"image":["a"]}}}`, n: 1, cacheable: true, media: true},
		{body: `{"token_ids":[1],"features":{"mm_hashes":null}}`, n: 1, cacheable: true},
		{body: `{"token_ids":[1],"content_parts":[]}`, n: 1, cacheable: true, media: true},
		{body: `{"sampling_params":{}}`, firstError: "token_ids"},
		{body: `{"token_ids":null}`, firstError: "token_ids"},
		{body: `{"token_ids":{}}`, firstError: "token_ids"},
		{body: `{"token_ids":[1],"token_ids":[2]}`, firstError: "token_ids"},
	} {
		var p Prompt
		err := p.Parse(Generate, []byte(c.body))
		var refused *Error
		if errors.As(err, &refused); c.firstError != "" || err != nil {
			if refused == nil || refused.Param != c.firstError {
				t.Errorf("%s: %v", c.body, err)
			}
			continue
		}
		if p.MaxTokens != c.max || p.Sequences != c.n || p.Cacheable != c.cacheable || p.HasMedia() != c.media || p.Stream != c.stream {
			t.Errorf("%s: max %d, n %d, cacheable %v, media %v, stream %v", c.body, p.MaxTokens, p.Sequences, p.Cacheable, p.HasMedia(), p.Stream)
		}
	}
}

// The next turn's prompt is the ids of this one and of its response.
func TestTokenIDResponseInNextTurn(t *testing.T) {
	const blockBytes = 64
	ids := func(from, n int) []byte { return []byte(`{"token_ids":` + idsJSON(from, n) + `}`) }
	_, next := blocksOf(t, Generate, ids(0, 100), blockBytes)
	for _, ask := range []struct {
		kind Kind
		body string
	}{{Generate, string(ids(0, 40))}, {Completion, `{"prompt":` + idsJSON(0, 40) + `,"return_token_ids":true}`}} {
		p, first := blocksOf(t, ask.kind, []byte(ask.body), blockBytes)
		var r Response
		f := func(how string, want []Block, take func()) {
			t.Helper()
			if !r.Reset(endOf(p)) {
				t.Fatalf("kind %d: no blocks are possible", ask.kind)
			}
			take()
			if got := append(slices.Clone(first), r.Finish()...); !slices.Equal(got, want) {
				t.Errorf("kind %d, %s: %d blocks, want %d", ask.kind, how, len(got), len(want))
			}
		}
		f("streamed", next, func() {
			for at := 40; at < 100; at += 3 {
				r.AddEvent([]byte(`{"request_id":"x","choices":[{"index":0,"finish_reason":null,"token_ids":` + idsJSON(at, 3) + `}]}`))
			}
			r.AddEvent([]byte(`{"choices":[{"index":0,"finish_reason":"stop","token_ids":[]}]}`))
			r.AddEvent([]byte(`{"choices":[],"usage":{"prompt_tokens":40}}`))
		})
		f("whole", next, func() {
			usage := r.AddBody([]byte(`{"usage":{"prompt_tokens":40},"choices":[{"index":0,"token_ids":` + idsJSON(40, 60) + `,"text":"x"}]}`))
			if string(usage) != `{"prompt_tokens":40}` {
				t.Errorf("usage %s", usage)
			}
		})
		f("without ids", first, func() {
			r.AddEvent([]byte(`{"choices":[{"index":0,"text":"x","token_ids":null}]}`))
			r.AddEvent([]byte(`{"choices":[{"index":0,"token_ids":` + idsJSON(40, 60) + `}]}`))
		})
	}
}
