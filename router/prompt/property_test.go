package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"unicode/utf16"
)

// member is one member of an object; object keeps their order, fields may be
// written in any.
type (
	member struct {
		key   string
		value any
	}
	object []member
	fields []member
)

// spell writes v as JSON in one of its many spellings: white space, escapes and
// the order of fields are left to chance.
func spell(r *rand.Rand, v any) []byte {
	var b []byte
	space := func() { b = append(b, []string{"", "", "", " ", "\n\t", "\r\n  "}[r.IntN(6)]...) }
	row := func(open, end byte, n int, item func(i int)) {
		b = append(b, open)
		for i := range n {
			if i > 0 {
				b = append(b, ',')
			}
			space()
			item(i)
			space()
		}
		b = append(b, end)
	}
	switch v := v.(type) {
	case object:
		row('{', '}', len(v), func(i int) {
			b = append(b, spell(r, v[i].key)...)
			space()
			b = append(b, ':')
			space()
			b = append(b, spell(r, v[i].value)...)
		})
	case fields:
		shuffled := make(object, len(v))
		for i, k := range r.Perm(len(v)) {
			shuffled[i] = v[k]
		}
		return spell(r, shuffled)
	case []any:
		row('[', ']', len(v), func(i int) { b = append(b, spell(r, v[i])...) })
	case nil:
		b = append(b, "null"...)
	case string:
		b = append(b, '"')
		for _, c := range v {
			b = append(b, spellRune(r, c)...)
		}
		b = append(b, '"')
	default:
		b = fmt.Append(b, v)
	}
	return b
}

func spellRune(r *rand.Rand, c rune) string {
	short := map[rune]string{'"': `\"`, '\\': `\\`, '/': `\/`, '\n': `\n`, '\t': `\t`, '\r': `\r`, '\b': `\b`, '\f': `\f`}
	must := c < ' ' || c == '"' || c == '\\'
	switch chance := r.IntN(8); {
	case short[c] != "" && (must && chance < 6 || chance == 0):
		return short[c]
	case !must && chance < 7:
		return string(c)
	}
	if high, low := utf16.EncodeRune(c); high != 0xfffd {
		return fmt.Sprintf(`\u%04x\u%04X`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, c)
}

// words makes a text that JSON spells in several ways and that is at times long.
func words(r *rand.Rand) string {
	all := []string{"the ", "cache", " is\n", "\"warm\"", "é", "前缀", "😀", "a/b\\c", "\t", "\u2028", "<&>", "\x00", "{\"a\": 1}", "func f() {\n\treturn\n}\n"}
	var b bytes.Buffer
	for range r.IntN(1 + r.IntN(60)) {
		b.WriteString(all[r.IntN(len(all))])
	}
	return b.String()
}

// content makes a text in one of the forms that messages have it in.
func content(r *rand.Rand) any {
	switch r.IntN(3) {
	case 0:
		return words(r)
	case 1:
		return []any{fields{{"type", "text"}, {"text", words(r)}}}
	}
	parts := []any{}
	for range r.IntN(4) {
		if r.IntN(4) == 0 {
			parts = append(parts, fields{{"type", "image_url"}, {"image_url", object{{"url", words(r)}}}})
		} else {
			parts = append(parts, fields{{"type", "text"}, {"text", words(r)}})
		}
	}
	return parts
}

// turn makes what follows in a conversation: a question, an answer, or a tool
// called and its result.
func turn(r *rand.Rand, reasoning bool) []any {
	message := func(role string, more ...member) any {
		return append(fields{{"role", role}, {"content", content(r)}}, more...)
	}
	var thought []member
	if reasoning {
		thought = []member{{"reasoning", words(r)}}
	}
	switch r.IntN(3) {
	case 0:
		return []any{message("user", member{"name", "u"})}
	case 1:
		return []any{message("assistant", thought...)}
	}
	arguments, _ := json.Marshal(map[string]any{"q": words(r), "n": r.IntN(10)})
	call := fields{{"id", words(r)}, {"type", "function"}, {"function", fields{{"name", "f"}, {"arguments", string(arguments)}}}}
	return []any{message("assistant", append(thought, member{"tool_calls", []any{call}})...), message("tool", member{"tool_call_id", "x"})}
}

// chatOf makes a body of messages; half of the chats have tools.
func chatOf(messages []any, tools bool) fields {
	body := fields{{"model", "m"}, {"messages", messages}, {"temperature", 0.5}}
	if tools {
		body = append(body, member{"tools", []any{fields{{"type", "function"}, {"function", fields{{"name", "f"}, {"description", "d\n"},
			{"parameters", object{{"type", "object"}, {"required", []any{"q"}}}}}}}}})
	}
	return body
}

func canonical(t *testing.T, body []byte) []byte {
	t.Helper()
	return parse(t, Chat, string(body)).Text
}

func TestPropertySpellingDoesNotMatter(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		messages := []any{fields{{"role", "system"}, {"content", content(r)}}}
		for range r.IntN(6) {
			messages = append(messages, turn(r, r.IntN(2) == 0)...)
		}
		chat := chatOf(messages, r.IntN(2) == 0)
		a, b := spell(r, chat), spell(r, chat)
		if got, want := canonical(t, b), canonical(t, a); !bytes.Equal(got, want) {
			t.Fatalf("seed %d: one chat, two canonical prompts\n%s\n%q\n%s\n%q", seed, a, want, b, got)
		}
	}
}

func TestPropertyMoreTurnsKeepThePrefix(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		tools := r.IntN(2) == 0
		messages := []any{fields{{"role", "developer"}, {"content", content(r)}}, fields{{"role", "user"}, {"content", content(r)}}}
		before := canonical(t, spell(r, chatOf(messages, tools)))
		for range 8 {
			messages = append(messages, turn(r, false)...)
			after := canonical(t, spell(r, chatOf(messages, tools)))
			if !bytes.HasPrefix(after, before) {
				t.Fatalf("seed %d: %q\nis no prefix of\n%q", seed, before, after)
			}
			before = after
		}
	}
}

// Reasoning is shown until the user speaks: until then, more turns keep the
// prefix, and from then on the chat is as if there had been none.
func TestPropertyReasoningKeepsThePrefixWithinATurn(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		messages := []any{fields{{"role", "user"}, {"content", content(r)}}}
		before := canonical(t, spell(r, chatOf(messages, true)))
		for range 8 {
			next := turn(r, true)
			asks := next[0].(fields)[0].value == "user"
			messages = append(messages, next...)
			after := canonical(t, spell(r, chatOf(messages, true)))
			if asks {
				var bare []any
				for _, m := range messages {
					var kept fields
					for _, f := range m.(fields) {
						if f.key != "reasoning" {
							kept = append(kept, f)
						}
					}
					bare = append(bare, kept)
				}
				before = canonical(t, spell(r, chatOf(bare, true)))
			}
			if !bytes.HasPrefix(after, before) || asks && len(after) != len(before) {
				t.Fatalf("seed %d: %q\nis no prefix of\n%q", seed, before, after)
			}
			before = after
		}
	}
}
