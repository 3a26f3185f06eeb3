package proxy

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"warmroute/proxy/apikey"
)

func TestALongAnswerIsChargedByItsAccountOrElseItsLength(t *testing.T) {
	filler := strings.Repeat(`{"token":"\"usage\":{\"completion_tokens\":1}"},`, 60_000) // 2.8 MB
	answer := func(end string) string {
		return answered("200 OK", `{"choices":[{"logprobs":[`+filler+`{}]}]`+end)
	}
	account := `,"usage":{"prompt_tokens":77,"total_tokens":577,"completion_tokens":500},"prompt_logprobs":null,"kv_transfer_params":null}`
	for i, c := range []struct {
		name, answer, ask string
		prompt, completed int
	}{
		{"account", answer(account), askWhole, 77, 500},
		{"no account", answer("}"), askWhole, 0, (len(`{"choices":[{"logprobs":[`+filler+`{}]}]`) + 1) / bytesPerToken},
		{"no account, and a bound", answer("}"), strings.Replace(askWhole, "{", `{"max_tokens":9,"n":2,`, 1), 0, 18},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := fmt.Sprint("key", i)
			f := serve(t, withKeys(keyOf(name, func(k *apikey.Key) { k.TokensPerMinute = 1000 })), &replica{script: always(c.answer)})
			if resp, got := f.post("/v1/chat/completions", c.ask, bearer(name)...); resp.StatusCode != 200 || len(got) < len(filler) {
				t.Fatalf("got %d, %d bytes", resp.StatusCode, len(got))
			}
			if c.prompt == 0 {
				c.prompt = f.promptTokens(c.ask, bearer(name)...)
			}
			f.counts(fmt.Sprintf(`warmroute_key_completion_tokens_total{key=%q} %d`, name, c.completed))
			f.counts(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key=%q} %d`, name, c.prompt))
		})
	}
}

func TestTheEndOfAnAnswerIsKeptHoweverItComes(t *testing.T) {
	var all []byte
	for i := range 2000 {
		all = fmt.Appendf(all, "%d ", i)
	}
	for _, n := range []int{0, 1, tailBytes - 1, tailBytes, tailBytes + 1, len(all)} {
		for name, r := range map[string]io.Reader{
			"at once": bytes.NewReader(all[:n]), "byte by byte": iotest.OneByteReader(bytes.NewReader(all[:n])), "in halves": iotest.HalfReader(bytes.NewReader(all[:n])),
		} {
			s := source{Reader: r}
			if _, err := io.Copy(io.Discard, &s); err != nil {
				t.Fatal(err)
			}
			if want := all[max(n-tailBytes, 0):n]; !bytes.Equal(s.last, want) || s.passed != n {
				t.Errorf("%d bytes %s: kept %d of %d", n, name, len(s.last), s.passed)
			}
		}
	}
}
