package prompt

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"
)

// english is a paragraph as chats hold them, newline and quotes included.
const english = "The scheduler said \"admit\" and went on; a prefix that is held\nneeds no second prefill, so the request waits only " +
	"for its own tail. "

func repeat(text string, size int) string {
	return strings.Repeat(text, size/len(text)+1)[:size]
}

// chatBody is a chat of about size bytes as the Python SDK writes it: a system
// prompt of a third of it, then turns.
func chatBody(t testing.TB, size int, text string) []byte {
	messages := []map[string]any{{"role": "system", "content": repeat(text, size/3)}}
	for i := range 10 {
		role := [...]string{"user", "assistant"}[i%2]
		messages = append(messages, map[string]any{"role": role, "content": repeat(fmt.Sprintf("%d. %s", i, text), size/15)})
	}
	return marshal(t, map[string]any{"messages": messages, "model": "tiny", "max_tokens": 100, "stream": true, "temperature": 0.7})
}

// toolsBody is an agent's request: its size lies in the tools.
func toolsBody(t testing.TB, size int) []byte {
	var tools []any
	for written := 0; written < size; written += 700 {
		property := func(d string) any { return map[string]any{"type": "string", "description": d} }
		tools = append(tools, map[string]any{"type": "function", "function": map[string]any{
			"name":        fmt.Sprintf("tool_%d", written),
			"description": repeat(english, 300),
			"parameters": map[string]any{"type": "object", "required": []string{"path"}, "properties": map[string]any{
				"path": property("The path of the file to look at, absolute."), "limit": property("How many lines to read at most."),
				"pattern": property("A regular expression in \"RE2\" syntax.")}},
		}})
	}
	return marshal(t, map[string]any{"messages": []any{map[string]any{"role": "user", "content": "go"}}, "tools": tools, "model": "tiny"})
}

// messagesBody is a turn of a coding agent, with the members in its order: most of it are the
// results of tools.
func messagesBody(t testing.TB, size int) []byte {
	var body strings.Builder
	text := func(n int) string { return string(marshal(t, repeat(english, n))) }
	fmt.Fprintf(&body, `{"model":"tiny","max_tokens":32000,"system":[{"type":"text","text":%s,"cache_control":{"type":"ephemeral"}}],`+
		`"messages":[{"role":"user","content":"go"}`, text(size/8))
	for i := range 40 {
		fmt.Fprintf(&body, `,{"role":"assistant","content":[{"type":"text","text":%s},{"type":"tool_use","id":"toolu_%d","name":"Read",`+
			`"input":{"file_path":"/src/main.go","limit":200}}]}`, text(200), i)
		fmt.Fprintf(&body, `,{"role":"user","content":[{"tool_use_id":"toolu_%d","type":"tool_result","content":%s}]}`, i, text(size/50))
	}
	body.WriteString("]}")
	return []byte(body.String())
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func BenchmarkPrompt(b *testing.B) {
	bodies := []struct {
		name string
		kind Kind
		body []byte
	}{
		{"chat 1KB", Chat, chatBody(b, 1<<10, english)},
		{"chat 32KB", Chat, chatBody(b, 32<<10, english)},
		{"chat 512KB", Chat, chatBody(b, 512<<10, english)},
		{"parts 32KB", Chat, marshal(b, map[string]any{"model": "tiny", "messages": []any{map[string]any{"role": "user",
			"content": []any{map[string]any{"type": "text", "text": repeat(english, 16<<10)},
				map[string]any{"type": "text", "text": repeat(english, 16<<10)}}}}})},
		{"chinese 32KB", Chat, chatBody(b, 32<<10-1, "前缀缓存命中时，请求不需要再次预填充。\n")},
		{"french 32KB", Chat, chatBody(b, 32<<10, "Voilà la fenêtre où l'été s'est arrêté, dit-il à Zoé. ")},
		{"tools 32KB", Chat, toolsBody(b, 32<<10)},
		{"text 32KB", Completion, marshal(b, map[string]any{"model": "tiny", "prompt": repeat(english, 32<<10)})},
		{"messages 200KB", Messages, messagesBody(b, 200<<10)},
		{"responses 32KB", Responses, marshal(b, map[string]any{"model": "tiny", "input": repeat(english, 32<<10)})},
		{"ids 32KB", Completion, marshal(b, map[string]any{"model": "tiny", "prompt": make([]int, 16<<10)})},
	}
	for _, c := range bodies {
		b.Run(c.name+"/parse", func(b *testing.B) {
			var p Prompt
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Parse(c.kind, c.body); err != nil {
					b.Fatal(err)
				}
				p.ApplyLayout(DefaultLayout)
			}
		})
		b.Run(c.name+"/parse+blocks", func(b *testing.B) {
			var p Prompt
			var blocks []Block
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Parse(c.kind, c.body); err != nil {
					b.Fatal(err)
				}
				p.ApplyLayout(DefaultLayout)
				blocks = p.AppendBlocks(blocks[:0], "tiny", 256)
			}
		})
		b.Run(c.name+"/text class", func(b *testing.B) {
			var p Prompt
			if err := p.Parse(c.kind, c.body); err != nil {
				b.Fatal(err)
			}
			p.ApplyLayout(DefaultLayout)
			media := p.AppendMediaPositions(nil)
			for b.Loop() {
				p.TextClass(media)
			}
		})
		if c.kind == Chat {
			b.Run(c.name+"/gjson", func(b *testing.B) {
				var text []byte
				b.SetBytes(int64(len(c.body)))
				b.ReportAllocs()
				for b.Loop() {
					if !utf8.Valid(c.body) || !gjson.ValidBytes(c.body) {
						b.Fatal("invalid")
					}
					text = appendChatByGJSON(text[:0], c.body)
				}
			})
		}
		b.Run(c.name+"/chained xxh3", func(b *testing.B) {
			b.SetBytes(int64(len(c.body)))
			for b.Loop() {
				chainedXXH3(c.body)
			}
		})
	}
}

// appendChatByGJSON appends the model, the roles and the texts of a chat, the least that a parser has to read.
func appendChatByGJSON(dst, body []byte) []byte {
	gjson.ParseBytes(body).ForEach(func(key, v gjson.Result) bool {
		switch key.String() {
		case "model":
			dst = append(dst, v.String()...)
		case "messages":
			v.ForEach(func(_, message gjson.Result) bool {
				var role, content gjson.Result
				message.ForEach(func(key, v gjson.Result) bool {
					switch key.String() {
					case "role":
						role = v
					case "content":
						content = v
					}
					return true
				})
				dst = append(append(dst, role.String()...), content.String()...)
				return true
			})
		}
		return true
	})
	return dst
}

// chainedXXH3 is what a decision is measured by: the hashes alone.
func chainedXXH3(b []byte) (hash uint64) {
	for ; len(b) >= 256; b = b[256:] {
		hash = xxh3.HashSeed(b[:256], hash)
	}
	return hash
}
