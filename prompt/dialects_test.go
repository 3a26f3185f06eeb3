package prompt

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// dialogTurn is a turn of a conversation that all three APIs can express.
type dialogTurn struct {
	user    []string // texts of a user; nil: a turn of the assistant
	text    string   // of the assistant
	thought string
	calls   []dialogCall // with their results, which follow
}

type dialogCall struct {
	name      string
	input     object
	arguments string // the input as text
	result    string
}

func drawCall(r *rand.Rand, n int) dialogCall {
	input := object{{"path", words(r)}, {"n", n}, {words(r), []any{nil, object{{"x", words(r)}}}}}
	return dialogCall{fmt.Sprint("f", n), input, string(spell(r, input)), "o" + words(r)}
}

// dialog draws a conversation that begins and ends with a user.
func dialog(r *rand.Rand) (turns []dialogTurn) {
	user := func() dialogTurn {
		t := dialogTurn{user: []string{"q" + words(r)}}
		for range r.IntN(3) {
			t.user = append(t.user, "t"+words(r))
		}
		return t
	}
	turns = append(turns, user())
	for range r.IntN(5) {
		t := dialogTurn{text: "a" + words(r)}
		if r.IntN(3) == 0 {
			t.thought = "r" + words(r)
		}
		for n := range r.IntN(3) {
			t.calls = append(t.calls, drawCall(r, n))
		}
		turns = append(turns, t, user())
	}
	return turns
}

// texts is a content of one or several texts, in parts of that type.
func texts(kind string, list []string) any {
	if len(list) == 1 {
		return list[0]
	}
	var parts []any
	for _, text := range list {
		parts = append(parts, fields{{"type", kind}, {"text", text}})
	}
	return parts
}

func asChat(system string, turns []dialogTurn) fields {
	messages := []any{fields{{"role", "system"}, {"content", system}}}
	for _, t := range turns {
		if t.user != nil {
			messages = append(messages, fields{{"role", "user"}, {"content", texts("text", t.user)}})
			continue
		}
		m := fields{{"role", "assistant"}, {"content", t.text}}
		if t.thought != "" {
			m = append(m, member{"reasoning", t.thought})
		}
		var calls, results []any
		for n, c := range t.calls {
			calls = append(calls, fields{{"id", fmt.Sprint(n)}, {"type", "function"},
				{"function", fields{{"name", c.name}, {"arguments", c.arguments}}}})
			results = append(results, fields{{"role", "tool"}, {"tool_call_id", fmt.Sprint(n)}, {"content", c.result}})
		}
		if calls != nil {
			m = append(m, member{"tool_calls", calls})
		}
		messages = append(append(messages, m), results...)
	}
	return fields{{"model", "m"}, {"messages", messages},
		{"tools", []any{fields{{"type", "function"}, {"function", dialogTool("parameters")}}}}}
}

func dialogTool(parameters string) fields {
	return fields{{"name", "f0"}, {"description", "reads\na file"}, {parameters, object{{"type", "object"}, {"required", []any{"path"}}}}}
}

func assistantBlocks(t dialogTurn) (blocks []any) {
	if t.thought != "" {
		blocks = append(blocks, fields{{"type", "thinking"}, {"thinking", t.thought}, {"signature", "s"}})
	}
	blocks = append(blocks, fields{{"type", "text"}, {"text", t.text}})
	for n, c := range t.calls {
		blocks = append(blocks, fields{{"type", "tool_use"}, {"id", fmt.Sprint(n)}, {"name", c.name}, {"input", c.input}})
	}
	return blocks
}

// asMessages writes the results of calls before the texts of the user who is next.
func asMessages(r *rand.Rand, system string, turns []dialogTurn) fields {
	var messages, results []any
	for _, t := range turns {
		if t.user == nil {
			messages = append(messages, fields{{"role", "assistant"}, {"content", assistantBlocks(t)}})
			for n, c := range t.calls {
				var content any = c.result
				if r.IntN(2) == 0 {
					content = []any{fields{{"type", "text"}, {"text", c.result}}}
				}
				results = append(results, fields{{"type", "tool_result"}, {"tool_use_id", fmt.Sprint(n)}, {"content", content}})
			}
			continue
		}
		content := texts("text", t.user)
		if results != nil {
			for _, text := range t.user {
				results = append(results, fields{{"type", "text"}, {"text", text}, {"cache_control", fields{{"type", "ephemeral"}}}})
			}
			content, results = results, nil
		}
		messages = append(messages, fields{{"role", "user"}, {"content", content}})
	}
	var head any = system
	if k := len(system) / 2; r.IntN(2) == 0 && bytes.IndexByte([]byte(system), 0x80) < 0 {
		for k > 0 && system[k]&0xc0 == 0x80 {
			k--
		}
		head = []any{fields{{"type", "text"}, {"text", billingHeader + ": cc_version=2; cch=" + fmt.Sprint(r.Int())}},
			fields{{"type", "text"}, {"text", system[:k]}}, fields{{"type", "text"}, {"text", system[k:]}}}
	}
	return fields{{"model", "m"}, {"max_tokens", 100}, {"messages", messages}, {"system", head}, {"tools", []any{dialogTool("input_schema")}}}
}

func assistantItems(t dialogTurn) (items []any) {
	if t.thought != "" {
		items = append(items, fields{{"type", "reasoning"}, {"id", "rs"}, {"summary", []any{}},
			{"content", []any{fields{{"type", "reasoning_text"}, {"text", t.thought}}}}})
	}
	items = append(items, fields{{"type", "message"}, {"id", "msg"}, {"role", "assistant"}, {"status", "completed"},
		{"content", []any{fields{{"type", "output_text"}, {"text", t.text}}}}})
	for n, c := range t.calls {
		items = append(items, fields{{"type", "function_call"}, {"call_id", fmt.Sprint(n)}, {"name", c.name}, {"arguments", c.arguments}})
	}
	return items
}

func asResponses(system string, turns []dialogTurn) fields {
	var items []any
	for _, t := range turns {
		if t.user != nil {
			items = append(items, fields{{"role", "user"}, {"content", texts("input_text", t.user)}})
			continue
		}
		items = append(items, assistantItems(t)...)
		for n, c := range t.calls {
			items = append(items, fields{{"type", "function_call_output"}, {"call_id", fmt.Sprint(n)}, {"output", c.result}})
		}
	}
	tool := append(dialogTool("parameters"), member{"type", "function"})
	return fields{{"model", "m"}, {"input", items}, {"instructions", system}, {"tools", []any{tool}}}
}

// A conversation has the same blocks in all three APIs, as vLLM renders the same prompt.
func TestPropertySameBlocksInAllAPIs(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 8))
		system, turns := "s"+words(r), dialog(r)
		chat := parse(t, Chat, string(spell(r, asChat(system, turns))))
		for name, other := range map[string]*Prompt{
			"Messages":  parse(t, Messages, string(spell(r, asMessages(r, system, turns)))),
			"Responses": parse(t, Responses, string(spell(r, asResponses(system, turns)))),
		} {
			if !bytes.Equal(other.Text, chat.Text) || other.seed != chat.seed || other.FirstMessageHash != chat.FirstMessageHash {
				t.Fatalf("seed %d, %s:\n%q\nchat:\n%q", seed, name, other.Text, chat.Text)
			}
		}
	}
}

// cut cuts a text into parts.
func cut(r *rand.Rand, text string) (parts []string) {
	for rest := []rune(text); len(rest) > 0; {
		n := min(1+r.IntN(20), len(rest))
		parts = append(parts, string(rest[:n]))
		rest = rest[n:]
	}
	return parts
}

func messagesEvents(r *rand.Rand, t dialogTurn) (events []any) {
	block := func(index int, start any, deltas ...any) {
		events = append(events, fields{{"type", "content_block_start"}, {"index", index}, {"content_block", start}})
		for _, d := range deltas {
			events = append(events, fields{{"type", "content_block_delta"}, {"index", index}, {"delta", d}})
		}
		events = append(events, fields{{"type", "content_block_stop"}, {"index", index}})
	}
	var deltas []any
	for _, part := range cut(r, t.text) {
		deltas = append(deltas, fields{{"type", "text_delta"}, {"text", part}})
	}
	block(0, fields{{"type", "text"}, {"text", ""}}, deltas...)
	for n, c := range t.calls {
		deltas = nil
		for _, part := range cut(r, c.arguments) {
			deltas = append(deltas, fields{{"type", "input_json_delta"}, {"partial_json", part}})
		}
		block(n+1, fields{{"type", "tool_use"}, {"id", "x"}, {"name", c.name}, {"input", object{}}}, deltas...)
	}
	return append(events, fields{{"type", "message_delta"}, {"delta", fields{{"stop_reason", "end_turn"}}},
		{"usage", fields{{"input_tokens", 3}}}}, fields{{"type", "message_stop"}})
}

func responsesEvents(r *rand.Rand, t dialogTurn) (events []any) {
	for _, part := range cut(r, t.text) {
		events = append(events, fields{{"type", "response.output_text.delta"}, {"output_index", 0}, {"delta", part}})
	}
	for n, item := range assistantItems(t) {
		events = append(events, fields{{"type", "response.output_item.added"}, {"output_index", n}, {"item", fields{{"type", "message"}}}})
		events = append(events, fields{{"type", "response.output_item.done"}, {"output_index", n}, {"item", item}})
	}
	return append(events, fields{{"type", "response.completed"}, {"response", fields{{"output", assistantItems(t)}}}})
}

func TestPropertyTypedResponseInNextTurn(t *testing.T) {
	t.Parallel()
	var response Response
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 9))
		system, turns := "s"+words(r), dialog(r)
		for i := range turns {
			turns[i].thought = ""
		}
		said := dialogTurn{text: "a" + words(r)}
		for n := range r.IntN(3) {
			said.calls = append(said.calls, drawCall(r, n))
		}
		after := append(slices.Clone(turns), said)
		for _, api := range []struct {
			kind   Kind
			body   func([]dialogTurn) fields
			events []any
			whole  fields
		}{
			{Messages, func(turns []dialogTurn) fields { return asMessages(r, system, turns) }, messagesEvents(r, said),
				fields{{"type", "message"}, {"content", assistantBlocks(said)}, {"usage", fields{{"input_tokens", 1}}}}},
			{Responses, func(turns []dialogTurn) fields { return asResponses(system, turns) }, responsesEvents(r, said),
				fields{{"object", "response"}, {"output", assistantItems(said)}, {"usage", fields{{"input_tokens", 1}}}}},
		} {
			p, first := blocksOf(t, api.kind, spell(r, api.body(turns)), 64)
			_, next := blocksOf(t, api.kind, spell(r, api.body(after)), 64)
			check := func(how string) {
				t.Helper()
				all := append(slices.Clone(first), response.Finish()...)
				if len(all) <= len(first) && len(next) > len(first)+len(said.calls) || !slices.Equal(all, next[:min(len(all), len(next))]) {
					t.Fatalf("seed %d, kind %d, %s: %d blocks of prompt and response are not the next turn's first of %d", seed, api.kind, how, len(all),
						len(next))
				}
			}
			if !response.Reset(endOf(p)) {
				t.Fatalf("seed %d: a plain conversation whose response can have no blocks", seed)
			}
			for _, e := range api.events {
				response.AddEvent(spell(r, e))
			}
			check("streamed")
			response.Reset(endOf(p))
			if usage := response.AddBody(spell(r, api.whole)); !bytes.Contains(usage, []byte("1")) {
				t.Errorf("seed %d: usage %q", seed, usage)
			}
			check("whole")
		}
	}
}

func TestTypedResponsesWithoutBlocks(t *testing.T) {
	ask := map[Kind]string{Messages: `{"messages":[{"role":"user","content":"q"}]}`, Responses: `{"input":"q"}`}
	for _, c := range []struct {
		kind   Kind
		events []string
	}{
		{Messages, []string{`{"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}`}},
		{Messages, []string{`{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"x"}}`}},
		{Messages, []string{`{"type":"content_block_start","content_block":{"type":"tool_use","name":"f"}}`,
			`{"type":"content_block_delta","delta":{"text":"late"}}`}},
		{Messages, []string{`{"type":`}},
		{Responses, []string{`{"type":"response.output_item.done","item":{"type":"reasoning"}}`}},
		{Responses, []string{`{"type":"response.output_item.done","item":{"type":"function_call","name":"f","arguments":"{}"}}`,
			`{"type":"response.output_text.delta","delta":"late"}`}},
	} {
		p, _ := blocksOf(t, c.kind, []byte(ask[c.kind]), 8)
		var response Response
		response.Reset(endOf(p))
		for _, e := range c.events {
			response.AddEvent([]byte(e))
		}
		if got := response.Finish(); got != nil {
			t.Errorf("%s: %d blocks", c.events, len(got))
		}
	}
}

func TestStatefulResponsesAreNotMatched(t *testing.T) {
	for _, body := range []string{`{"input":"q","previous_response_id":"resp_1"}`, `{"input":"q","previous_input_messages":[]}`} {
		if p := parse(t, Responses, body); p.Cacheable || len(p.AppendBlocks(nil, "m", 1)) > 0 {
			t.Errorf("%s: Cacheable is %v", body, p.Cacheable)
		}
	}
}

// Reasoning effort and tool choice change a prompt as a whole.
func TestSeedsOfMessagesAndResponses(t *testing.T) {
	chat := func(more string) uint64 { return parse(t, Chat, `{"messages":[]`+more+`}`).seed }
	for _, c := range []struct {
		kind       Kind
		body, more string
	}{
		{Messages, `{"messages":[],"output_config":{"effort":"high"}}`, `,"reasoning_effort":"high"`},
		{Messages, `{"messages":[],"thinking":{"type":"disabled"},"output_config":{"effort":"high"}}`, `,"reasoning_effort":"none"`},
		{Messages, `{"messages":[],"thinking":{"type":"enabled","budget_tokens":9}}`, ``},
		{Messages, `{"messages":[],"tool_choice":{"type":"none"}}`, `,"tool_choice":"none"`},
		{Messages, `{"messages":[],"tool_choice":{"type":"auto"},"cache_salt":"x"}`, `,"cache_salt":"x"`},
		{Responses, `{"input":[],"reasoning":{"effort":"low"}}`, `,"reasoning_effort":"low"`},
		{Responses, `{"input":[],"tool_choice":"none","chat_template_kwargs":{"a":1}}`, `,"tool_choice":"none","chat_template_kwargs":{"a":1}`},
	} {
		if got := parse(t, c.kind, c.body).seed; got != chat(c.more) {
			t.Errorf("%s: not the seed of a chat with %q", c.body, c.more)
		}
	}
}
