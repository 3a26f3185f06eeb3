package prompt

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func parseWithLayout(t *testing.T, kind Kind, body string, l Layout) *Prompt {
	t.Helper()
	p := new(Prompt)
	if err := p.Parse(kind, []byte(body)); err != nil {
		t.Fatalf("%v\n%s", err, body)
	}
	p.ApplyLayout(l)
	return p
}

func TestLayouts(t *testing.T) {
	const inline = `{"role":"user","content":"a"},{"role":"system","content":"x"},{"role":"assistant","content":"b"},{"role":"system",` +
		`"content":"y"},{"role":"user","content":"c"}`
	const merged = `{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}`
	const thought = `{"role":"user","content":"a"},{"role":"assistant","reasoning":"r","content":"b"},{"role":"user","content":"c"}`
	developer := strings.Replace(inline, `"role":"system","content":"x"`, `"role":"developer","content":"x"`, 1)
	for _, c := range []struct {
		name       string
		kind       Kind
		body       string
		layout     Layout
		sameKind   Kind
		sameAs     string
		sameLayout Layout
	}{
		{"merged into the system prompt", Messages, `{"system":"s","messages":[` + inline + `]}`, 0, Messages, `{"system":"sxy","messages":[` +
			merged + `]}`, DefaultLayout},
		{"merged without a system prompt", Messages, `{"messages":[` + inline + `]}`, 0, Messages, `{"system":"xy","messages":[` + merged + `]}`,
			DefaultLayout},
		{"in place", Messages, `{"system":"s","messages":[` + inline + `]}`, SystemInPlace, Chat,
			`{"messages":[{"role":"system","content":"s"},` + inline + `]}`, 0},
		{"developer messages merged in a chat", Chat, `{"messages":[{"role":"system","content":"s"},` + developer + `]}`, SystemInPlace, Chat,
			`{"messages":[{"role":"system","content":"s\n\nx\n\ny"},` + merged + `]}`, DefaultLayout},
		{"developer messages merged in Responses", Responses, `{"instructions":"s","input":[` + developer + `]}`, 0, Chat,
			`{"messages":[{"role":"system","content":"s\n\nx\n\ny"},` + merged + `]}`, DefaultLayout},
		{"system messages of a chat stay", Chat, `{"messages":[` + inline + `]}`, 0, Chat, `{"messages":[` + inline + `]}`, DefaultLayout},
		{"reasoning dropped", Chat, `{"messages":[` + thought + `]}`, 0, Chat, `{"messages":[` + merged + `]}`, 0},
		{"merged with tools", Messages, `{"system":"s","tools":[{"name":"f"}],"messages":[` + inline + `]}`, 0, Messages,
			`{"system":"sxy","tools":[{"name":"f"}],"messages":[` + merged + `]}`, DefaultLayout},
	} {
		got, want := parseWithLayout(t, c.kind, c.body, c.layout), parseWithLayout(t, c.sameKind, c.sameAs, c.sameLayout)
		if !bytes.Equal(got.Text, want.Text) {
			t.Errorf("%s:\n%q\nwant\n%q", c.name, got.Text, want.Text)
		}
	}
	const tools = `"tools":[{"name":"f"}],`
	first := parseWithLayout(t, Messages, `{"system":"s",`+tools+`"messages":[]}`, ToolsFirst)
	if alone := parseWithLayout(t, Messages, `{`+tools+`"messages":[]}`, 0); !bytes.HasPrefix(first.Text, alone.Text) || len(alone.Text) == 0 {
		t.Errorf("%q does not begin with the tools", first.Text)
	}
	kept := parseWithLayout(t, Chat, `{"messages":[`+thought+`]}`, KeepReasoning)
	if before := parseWithLayout(t, Chat, `{"messages":[`+strings.TrimSuffix(thought, `,{"role":"user","content":"c"}`)+`]}`,
		KeepReasoning); !bytes.HasPrefix(kept.Text, before.Text) {
		t.Errorf("%q does not begin with %q", kept.Text, before.Text)
	}
}

// A tool that is added or removed on the way changes the list of tools.
func TestToolChanges(t *testing.T) {
	body := func(system string) string {
		return `{"system":"s","tools":[{"name":"f"}],"messages":[{"role":"user","content":"a"},{"role":"system","content":[` + system + `]}]}`
	}
	plain := parse(t, Messages, body(`{"type":"text","text":"x"}`))
	changed := parse(t, Messages, body(`{"type":"text","text":"x"},{"type":"tool_addition","tool":{"type":"tool_definition",`+
		`"definition":{"name":"g","input_schema":{}}}}`))
	if n := common(plain.Text, changed.Text); n < len("system s") || n >= bytes.IndexByte(plain.Text, 'a') &&
		bytes.Contains(plain.Text[:n], []byte("user")) {
		t.Errorf("the prompts have %d bytes in common: %q", n, plain.Text[:n])
	}
}

func TestSameImageInAllAPIs(t *testing.T) {
	const data = "iVBORw0KGgo="
	want := parse(t, Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"q"},{"type":"image_url",`+
		`"image_url":{"url":"data:image/png;base64,`+data+`"}}]}]}`)
	for kind, body := range map[Kind]string{
		Messages: `{"messages":[{"role":"user","content":[{"type":"text","text":"q"},{"type":"image","cache_control":{},"source":{"data":"` +
			data + `","media_type":"image/png","type":"base64"}}]}]}`,
		Responses: `{"input":[{"role":"user","content":[{"type":"input_text","text":"q"},{"type":"input_image","detail":"auto",` +
			`"image_url":"data:image\/png;base64,` + data + `"}]}]}`,
	} {
		if got := parse(t, kind, body); !bytes.Equal(got.Text, want.Text) || !got.HasMedia() {
			t.Errorf("%s: not the prompt of the chat", body)
		}
	}
	url := parse(t, Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/b"}}]}]}`)
	if got := parse(t, Messages,
		`{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://a/b"}}]}]}`); !bytes.Equal(got.Text,
		url.Text) {
		t.Error("the same URL in Messages is another image")
	}
}

// A fork says how much of a turn's prompt the turn before has left in the cache, in a replica
// with its bit and in one without.
func TestPropertyForks(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 10))
		text := func(size int) string { return repeat(words(r)+" "+english, size) }
		systemText := text(300)
		var messages []any
		say := func(role, text string) {
			messages = append(messages, fields{{"role", role}, {"content", text}})
		}
		think := func() {
			messages = append(messages,
				fields{{"role", "assistant"},
					{"content", []any{fields{{"type", "thinking"}, {"thinking", text(300)}}, fields{{"type", "text"}, {"text", text(100)}}}}})
		}
		say("user", text(200))
		for range 1 + r.IntN(3) {
			think()
			say("system", text(200))
			say("user", text(200))
		}
		think()
		before := slices.Clone(messages)
		say("system", text(150))
		if r.IntN(2) == 0 {
			say("system", text(150))
		}
		say("user", text(200))
		body := func(messages []any) string {
			return string(spell(r, fields{{"model", "m"}, {"system", "s" + systemText}, {"messages", messages},
				{"tools", []any{dialogTool("input_schema")}}}))
		}
		turn, next := body(before), body(messages)
		shared := func(l Layout) float64 {
			a, b := parseWithLayout(t, Messages, turn, l), parseWithLayout(t, Messages, next, l)
			return float64(common(a.Text, b.Text)) / float64(len(b.Text))
		}
		// Without another bit than the fork's the prompts may part before the fork.
		all := SystemInPlace | KeepReasoning | Layout(r.IntN(2))*ToolsFirst
		for layout, bits := range map[Layout]Layout{
			all:                  SystemInPlace | KeepReasoning,
			all &^ KeepReasoning: KeepReasoning,
			all &^ SystemInPlace: SystemInPlace | ToolsFirst,
		} {
			forks := parseWithLayout(t, Messages, next, layout).Forks()
			for _, f := range forks {
				if f.Bit&bits == 0 {
					continue
				}
				bits &^= f.Bit
				const slack = 0.01
				with, without := shared(layout|f.Bit), shared(layout&^f.Bit)
				if without < f.Without-slack || without > f.WithoutMost+slack || with <= f.WithoutMost || with > f.With+slack {
					t.Fatalf("seed %d, layout %b: fork %+v, but the shares are %.3f without and %.3f with", seed, layout, f, without, with)
				}
			}
			if bits != 0 {
				t.Fatalf("seed %d, layout %b: no fork for %b in %+v", seed, layout, bits, forks)
			}
		}
	}
}
