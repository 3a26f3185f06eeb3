//go:build vllm

package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
)

// tokenize asks the replica at REPLICA_URL for the tokens of a chat.
func tokenize(t *testing.T, body []byte) (tokens []int) {
	t.Helper()
	base := os.Getenv("REPLICA_URL")
	if base == "" {
		t.Fatal("REPLICA_URL is not set: the base URL of a vLLM replica")
	}
	resp, err := http.Post(base+"/tokenize", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	response, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("/tokenize: %s: %s", resp.Status, response)
	}
	var parsed struct{ Tokens []int }
	if err := json.Unmarshal(response, &parsed); err != nil {
		t.Fatal(err)
	}
	return parsed.Tokens
}

// script makes texts of one kind. A chat has one: the tokenizer decides how many
// bytes of it make a token, and a prompt is measured by one figure.
type script struct {
	name  string
	parts []string
}

func (s script) text(r *rand.Rand, bytes int) string {
	var b strings.Builder
	for b.Len() < bytes {
		b.WriteString(s.parts[r.IntN(len(s.parts))])
	}
	return b.String()
}

var scripts = []script{
	{"english", strings.SplitAfter("the request that waits in a queue \"first\" is sent to the backend which holds its prefix. \nEvery "+
		"other one goes where the load is low, and so on; ", " ")},
	{"code", strings.SplitAfter("def pick(self, request):\n|    for backend in self.backends:\n|        if backend.ready and not "+
		"backend.draining:\n|            cost = backend.waiting * 2 + request.size\n|    return min(costs, key=lambda c: c[\"cost\"])\n|# "+
		"what is left\n|import json, os\n", "|")},
	{"unicode", []string{"前缀缓存", "命中时，", "请求不需要", "再次预填充。\n", "😀", "“热”的副本"}},
}

// conversations makes chats that share different parts of their prompts.
func conversations(s script) (bodies [][]byte) {
	r := rand.New(rand.NewPCG(7, 7))
	message := func(role string, content any, more ...member) any {
		return append(fields{{"role", role}, {"content", content}}, more...)
	}
	parts := func(texts ...string) any {
		var list []any
		for _, text := range texts {
			list = append(list, fields{{"type", "text"}, {"text", text}})
		}
		return list
	}
	tool := func(name string) any {
		return fields{{"type", "function"}, {"function", fields{{"name", name}, {"description", s.text(r, 300)}, {"parameters",
			object{{"type", "object"}, {"properties", object{{"path", object{{"type", "string"}, {"description", s.text(r, 100)}}}}},
				{"required", []any{"path"}}}}}}}
	}
	system, half := s.text(r, 3000), s.text(r, 1500)
	first, second, output := s.text(r, 600), s.text(r, 900), s.text(r, 700)
	look, find := tool("look"), tool("find")
	arguments, _ := json.Marshal(map[string]string{"path": s.text(r, 80)})
	call := member{"tool_calls", []any{fields{{"id", "call_1"}, {"type", "function"},
		{"function", fields{{"name", "look"}, {"arguments", string(arguments)}}}}}}

	chat := []any{message("system", system), message("user", first)}
	longer := append(chat[:2:2], message("assistant", output), message("user", parts(second, first)))
	longest := append(longer[:4:4], message("assistant", nil, call), message("tool", output, member{"tool_call_id", "call_1"}),
		message("user", second))
	other := []any{message("system", system), message("user", parts(second))}
	early := []any{message("system", half+system), message("user", first)}
	halved := []any{message("system", half+first), message("user", first)}
	bare := []any{message("user", first), message("assistant", output), message("user", second)}
	barer := []any{message("user", first), message("assistant", output), message("user", first)}
	brief := []any{message("system", half)}
	for range 8 {
		brief = append(brief, message("user", s.text(r, 30)), message("assistant", s.text(r, 60)))
	}
	briefer := brief[:9]
	for _, messages := range [][]any{chat, longer, longest, other, early, halved, bare, barer, brief, briefer} {
		for _, tools := range [][]any{nil, {look}, {look, find}, {find, look}} {
			body := fields{{"model", "tiny"}, {"messages", messages}}
			if tools != nil {
				body = append(body, member{"tools", tools})
			}
			bodies = append(bodies, spell(r, body))
		}
	}
	return bodies
}

// The index believes in shared bytes; the cache holds shared tokens.
func TestSharedBytesShareTokens(t *testing.T) {
	const block = 256 // bytes
	type chat struct {
		text   []byte
		tokens []int
		name   string
	}
	var chats []chat
	for _, s := range scripts {
		for i, body := range conversations(s) {
			chats = append(chats, chat{canonical(t, body), tokenize(t, body), fmt.Sprint(s.name, " ", i)})
		}
	}
	pairs, worst := 0, 0.0
	for i, a := range chats {
		perToken := float64(len(a.text)) / float64(len(a.tokens))
		for j, b := range chats {
			if i == j {
				continue
			}
			pairs++
			bytes, tokens := common(a.text, b.text), common(a.tokens, b.tokens)
			off := math.Abs(float64(bytes)-float64(tokens)*perToken) / block
			if worst = max(worst, off); off > 1 {
				t.Errorf("%s and %s: %d bytes of %d at %.2f a token, but %d tokens of %d (%.2f blocks off)",
					a.name, b.name, bytes, len(a.text), perToken, tokens, len(a.tokens), off)
			}
		}
	}
	t.Logf("%d pairs, the worst %.2f blocks off", pairs, worst)
}
