package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// The kinds of prompts that requests have.
const (
	hot    = "hot"    // all are the same
	cold   = "cold"   // no two begin alike
	shared = "shared" // the first half is the same in all
)

const nonceLen = 16

// ask is a request that is sent many times, each time with another nonce.
type ask struct {
	bytes []byte // head and body
	nonce []byte // the part of bytes that differs; nil: none does
	rng   *rand.Rand
}

// newAsk makes a chat of about size bytes. Of a stream, chunks and interval, in
// milliseconds, say how long and how often; chunks 0 is no stream.
func newAsk(seed uint64, size int, kind string, chunks, interval int) *ask {
	end := `"}],"temperature":0.7}`
	if chunks > 0 {
		end = fmt.Sprintf(`"}],"temperature":0.7,"stream":true,"max_completion_tokens":%d,"seed":%d}`, chunks, interval)
	}
	begin := `{"model":"` + model + `","messages":[{"role":"system","content":"You answer questions."},{"role":"user","content":"`
	text := prose(size - len(begin) - len(end) - nonceLen)
	mark := strings.Repeat("0", nonceLen)
	cut := 0
	if kind == shared {
		cut = len(text) / 2
		if text[cut-1] == '\\' {
			cut++
		}
	}
	body := begin + text[:cut] + mark + text[cut:] + end
	a := &ask{rng: rand.New(rand.NewPCG(seed, 1))}
	a.bytes = fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: application/json\r\n"+
		"User-Agent: OpenAI/Python 3.52.0\r\nAuthorization: Bearer none\r\nX-Stainless-Lang: python\r\nX-Stainless-Runtime: CPython\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if kind != hot {
		at := len(a.bytes) - len(body) + len(begin) + cut
		a.nonce = a.bytes[at : at+nonceLen]
	}
	return a
}

// next returns the request with a nonce that none had.
func (a *ask) next() []byte {
	for i, v := 0, a.rng.Uint64(); i < len(a.nonce); i++ {
		a.nonce[i] = "0123456789abcdef"[v&15]
		v >>= 4
	}
	return a.bytes
}

// prose is n bytes of JSON string that read like text: words, and an escape in
// every 60 bytes or so.
func prose(n int) string {
	words := strings.Fields("the of and to in is that for it as with on by at this have are not which one more when people other time could system data number question government company history market example program report service country")
	rng := rand.New(rand.NewPCG(7, 7))
	var b strings.Builder
	for line := 0; b.Len() < n; {
		word := words[rng.IntN(len(words))]
		if line += len(word) + 1; line > 60 {
			word, line = word+`.\n`, 0
		}
		b.WriteString(word + " ")
	}
	text := strings.TrimRight(b.String()[:max(n, 0)], `\`)
	return text + strings.Repeat(" ", max(n, 0)-len(text))
}
