package proxy

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"

	"warmroute/proxy/api"
	"warmroute/proxy/relay"
)

func TestEventScanner(t *testing.T) {
	chat := func(choice string) string { return `data: {"id":"c","choices":[` + choice + `]}` + "\n\n" }
	type found struct {
		events                          int
		content, finished, aborted, end bool
		unexplained                     bool
		failed                          int // status; 0: none
		usage                           relay.Usage
	}
	cases := []struct {
		name   string
		format api.Format
		stream string
		want   found
	}{
		{"comments", api.ChatFormat, ": keep-alive\n\n:\n\n", found{}},
		{"empty data", api.ChatFormat, "data:\n\ndata: \n\n", found{}},
		{"role", api.ChatFormat, role, found{events: 1}},
		{"content", api.ChatFormat, role + hello, found{events: 2, content: true}},
		{"no space after the colon", api.ChatFormat, strings.ReplaceAll(role+hello+doneLine, "data: ", "data:"),
			found{events: 2, content: true, end: true}},
		{"CRLF", api.ChatFormat, strings.ReplaceAll(hello+doneLine, "\n", "\r\n"), found{events: 1, content: true, end: true}},
		{"CR", api.ChatFormat, strings.ReplaceAll(hello+doneLine, "\n", "\r"), found{events: 1, content: true, end: true}},
		{"reasoning", api.ChatFormat, chat(`{"delta":{"reasoning":"hm"}}`), found{events: 1, content: true}},
		{"reasoning_content", api.ChatFormat, chat(`{"delta":{"role":"assistant","reasoning_content":"hm","content":null}}`),
			found{events: 1, content: true}},
		{"tool call", api.ChatFormat, chat(`{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}}`),
			found{events: 1, content: true}},
		{"no tool call", api.ChatFormat, chat(`{"delta":{"role":"assistant","content":"","tool_calls":[],"refusal":null}}`), found{events: 1}},
		{"second choice", api.ChatFormat, chat(`{"index":0,"delta":{"content":""}},{"index":1,"delta":{"content":"x"}}`),
			found{events: 1, content: true}},
		{"stop", api.ChatFormat, role + stop, found{events: 2, finished: true}},
		{"abort", api.ChatFormat, role + abort + doneLine, found{events: 2, aborted: true, end: true}},
		{"abort after content", api.ChatFormat, hello + abort, found{events: 2, content: true, aborted: true}},
		{"end without a word of why", api.ChatFormat, role + counted + doneLine,
			found{events: 2, aborted: true, end: true, usage: relay.Usage{Known: true, HasCached: true, PromptTokens: 12, CachedTokens: 8,
				CompletionTokens: 3}}},
		{"nothing but the end", api.CompletionFormat, doneLine, found{aborted: true, end: true}},
		{"usage", api.ChatFormat, role + counted,
			found{events: 2, usage: relay.Usage{Known: true, HasCached: true, PromptTokens: 12, CachedTokens: 8, CompletionTokens: 3}}},
		{"usage: null", api.ChatFormat, `data: {"choices":[],"usage":null}` + "\n\n", found{events: 1}},
		{"usage that grows", api.ChatFormat, hello + strings.Replace(counted, `completion_tokens":3`, `completion_tokens":1`, 1) + counted,
			found{events: 3, content: true, usage: relay.Usage{Known: true, HasCached: true, PromptTokens: 12, CachedTokens: 8,
				CompletionTokens: 3}}},
		{"usage in what was said", api.ChatFormat, chat(`{"delta":{"content":"\"usage\":{\"prompt_tokens\":9}"}}`),
			found{events: 1, content: true}},
		{"error", api.ChatFormat, dead + doneLine, found{end: true, failed: 500}},
		{"client's error", api.ChatFormat, tooLong + doneLine, found{end: true, failed: 400}},
		{"compact error", api.ChatFormat, `data: {"error":{"message":"x","code":503}}` + "\n\n", found{failed: 503}},
		{"error without a code", api.ChatFormat, `data: {"error":{"message":"x"}}` + "\n\n", found{failed: 500}},
		{"error with an odd code", api.ChatFormat, `data: {"error":{"message":"x","code":"7"}}` + "\n\n", found{failed: 500}},
		{"no JSON", api.ChatFormat, "data: hello\n\n", found{events: 1}},
		{"text", api.CompletionFormat, chat(`{"text":"Hi"}`), found{events: 1, content: true}},
		{"empty text", api.CompletionFormat, chat(`{"text":"","finish_reason":"length"}`), found{events: 1, finished: true}},
		{"aborted text", api.CompletionFormat, chat(`{"text":"","finish_reason":"abort"}`), found{events: 1, aborted: true}},
		{"token ids", api.TokensFormat, chat(`{"index":0,"finish_reason":null,"token_ids":[1,2]}`), found{events: 1, content: true}},
		{"no token ids", api.TokensFormat, chat(`{"index":0,"finish_reason":"stop","token_ids":[]}`), found{events: 1, finished: true}},
		{"token ids, aborted", api.TokensFormat, chat(`{"token_ids":[1]}`) + chat(`{"token_ids":[],"finish_reason":"abort"}`) + doneLine,
			found{events: 2, content: true, aborted: true, end: true}},
		{"usage of token ids", api.TokensFormat, chat(`{"token_ids":[1]}`) + counted,
			found{events: 2, content: true, usage: relay.Usage{Known: true, HasCached: true, PromptTokens: 12, CachedTokens: 8,
				CompletionTokens: 3}}},
		{"response begins", api.ResponsesFormat, `data: {"type":"response.created","response":{"usage":null}}` + "\n\n" +
			`data: {"type":"response.in_progress"}` + "\n\n", found{}},
		{"response", api.ResponsesFormat, "event: x\n" + `data: {"type":"response.output_item.added"}` + "\n\n" +
			`data: {"delta":"Hi","type":"response.output_text.delta"}` + "\n\n", found{events: 2, content: true}},
		{"response ends", api.ResponsesFormat,
			`data: {"type":"response.completed","response":{"usage":{"input_tokens":7,"output_tokens":2,` +
				`"input_tokens_details":{"cached_tokens":4}}}}` + "\n\n",
			found{events: 1, finished: true, end: true, usage: relay.Usage{Known: true, HasCached: true, PromptTokens: 7, CachedTokens: 4,
				CompletionTokens: 2}}},
		{"response is incomplete", api.ResponsesFormat,
			`data: {"type":"response.incomplete","response":{"status":"incomplete","usage":{"input_tokens":7,"output_tokens":2}}}` + "\n\n",
			found{events: 1, finished: true, end: true, usage: relay.Usage{Known: true, PromptTokens: 7, CompletionTokens: 2}}},
		{"response is cancelled", api.ResponsesFormat, `data: {"type":"response.completed","response":{"status":"cancelled"}}` + "\n\n",
			found{events: 1, aborted: true, end: true}},
		{"response of no token", api.ResponsesFormat,
			`data: {"type":"response.completed","response":{"status":"completed","output":[],"usage":{"input_tokens":7,"output_tokens":0}}}` +
				"\n\n", found{events: 1, aborted: true, end: true, usage: relay.Usage{Known: true, PromptTokens: 7}}},
		{"long response", api.ResponsesFormat, "event: response.completed\n" + `data: {"response":{"output":"` +
			strings.Repeat("x", 2*relay.MaxLineBytes) + `","status":"completed","usage":{"input_tokens":7,"output_tokens":2}},` +
			`"type":"response.completed"}` + "\n\n", found{events: 1, content: true, finished: true, end: true,
			usage: relay.Usage{Known: true, PromptTokens: 7, CompletionTokens: 2}}},
		{"long response, cancelled", api.ResponsesFormat, "event: response.completed\n" + `data: {"response":{"output":"` +
			strings.Repeat("x", 2*relay.MaxLineBytes) + `","status":"cancelled","usage":null},"type":"response.completed"}` + "\n\n",
			found{events: 1, content: true, unexplained: true, end: true}},
		{"long event of a response", api.ResponsesFormat, "event: response.output_text.done\n" + `data: {"text":"` +
			strings.Repeat("x", 2*relay.MaxLineBytes) + `","type":"response.output_text.done"}` + "\n\n", found{events: 1, content: true}},
		{"response fails", api.ResponsesFormat, `data: {"code":null,"message":"x","type":"error"}` + "\n\n", found{end: true, failed: 500}},
		{"response fails before output", api.ResponsesFormat,
			`data: {"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}` + "\n\n",
			found{end: true, failed: 500}},
		{"response fails by its prompt", api.ResponsesFormat,
			`data: {"type":"response.failed","response":{"status":"failed","error":{"code":"invalid_prompt"}}}` + "\n\n",
			found{end: true, failed: 400}},
		{"response fails after content", api.ResponsesFormat, `data: {"delta":"Hi","type":"response.output_text.delta"}` + "\n\n" +
			`data: {"code":null,"message":"x","type":"error"}` + "\n\n", found{events: 1, content: true, end: true, failed: 500}},
		{"message begins", api.MessagesFormat, `data: {"type":"ping"}` + "\n\n" +
			`data: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":0}}}` + "\n\n",
			found{events: 1, usage: relay.Usage{Known: true, PromptTokens: 7}}},
		{"message", api.MessagesFormat, `data: {"type":"content_block_delta","delta":{"text":"Hi"}}` + "\n\n" +
			`data: {"type":"message_delta","usage":{"output_tokens":2,"cache_read_input_tokens":4}}` + "\n\n",
			found{events: 2, content: true, usage: relay.Usage{Known: true, HasCached: true, CachedTokens: 4, CompletionTokens: 2}}},
		{"message fails", api.MessagesFormat, `data: {"type":"error","error":{"type":"overloaded_error"}}` + "\n\n",
			found{end: true, failed: 503}},
		{"message ends", api.MessagesFormat, messagesContent + messagesEnd(`"end_turn"`, `{"output_tokens":2}`),
			found{events: 5, content: true, finished: true, end: true, usage: relay.Usage{Known: true, CompletionTokens: 2}}},
		{"message is aborted", api.MessagesFormat, messagesContent + messagesEnd("null", `{"output_tokens":2}`),
			found{events: 5, content: true, unexplained: true, end: true, usage: relay.Usage{Known: true, CompletionTokens: 2}}},
		{"message of no token", api.MessagesFormat, messagesEnd(`"end_turn"`, `{"output_tokens":0}`),
			found{events: 3, aborted: true, end: true, usage: relay.Usage{Known: true}}},
		{"message whose reason comes late", api.MessagesFormat, strings.TrimSuffix(messagesEnd("null", `{"output_tokens":2}`),
			"event: message_stop\n"+`data: {"type":"message_stop"}`+"\n\n") + messagesEnd(`"end_turn"`, `{"output_tokens":2}`),
			found{events: 5, finished: true, end: true, usage: relay.Usage{Known: true, CompletionTokens: 2}}},
		{"error: null", api.ChatFormat, strings.Replace(hello, "{", `{"error":null,`, 1) + strings.Replace(hello, "{", `{"error": null,`, 1),
			found{events: 2, content: true}},
		{"error: empty", api.ChatFormat, strings.Replace(hello, "{", `{"error":"",`, 1), found{events: 1, content: true}},
		{"error: a text", api.ChatFormat, `data: {"error":"x"}` + "\n\n", found{failed: 500}},
		{"transcript", api.PlainFormat, `data: {"type":"transcript.text.delta","delta":"transcript.text.done"}` + "\n\n",
			found{events: 1, content: true}},
		{"transcript ends", api.PlainFormat, `data: {"type":"transcript.text.done","text":"x"}` + "\n\n",
			found{events: 1, content: true, end: true}},
		{"transcript stops", api.PlainFormat, "data: x\n\n" + chat(`{"delta":{"content":""},"finish_reason":"stop"}`),
			found{events: 2, content: true, finished: true}},
		{"anything", api.PlainFormat, "data: x\n\n", found{events: 1, content: true}},
		{"line too long", api.ChatFormat, chat(`{"delta":{"content":"` + strings.Repeat("x", relay.MaxLineBytes) + `"}}`),
			found{events: 1, content: true}},
		{"comment too long", api.ChatFormat, ":" + strings.Repeat("x", relay.MaxLineBytes) + "\n\n" + role, found{events: 1}},
		{"line without an end", api.ChatFormat, strings.TrimSuffix(hello, "\n\n"), found{}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := relay.Scanner{Format: c.format}
			s.Scan([]byte(c.stream))
			got := found{s.Events, s.Content, s.Finished, s.Aborted, s.Done, s.Unexplained, 0, s.Usage}
			if s.ErrorEvent != nil {
				got.failed = s.ErrorStatus()
			}
			if got != c.want {
				t.Errorf("found %+v\nwant  %+v", got, c.want)
			}
		})
	}
}

func FuzzEventScanner(f *testing.F) {
	f.Add(goodStream, byte(api.ChatFormat), uint16(3))
	f.Add(role+abort+doneLine, byte(api.ChatFormat), uint16(1))
	f.Add(dead+doneLine, byte(api.CompletionFormat), uint16(100))
	f.Add("data: {\"choices\":[{\"token_ids\":[1]}]}\n\n"+doneLine, byte(api.TokensFormat), uint16(5))
	f.Add("data: {\"type\":\"response.output_text.delta\"}\r\n\r\n:\n", byte(api.ResponsesFormat), uint16(7))
	f.Add("data: {\"sequence_number\":3}\r\rdata: {\"sequence_number\":4}\r\n\r\n", byte(api.StoredFormat), uint16(0))
	f.Add("data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":7}}}\n\n", byte(api.MessagesFormat), uint16(11))
	f.Add(strings.Repeat("data: x", relay.MaxLineBytes/4)+"\n"+role, byte(api.PlainFormat), uint16(4096))
	f.Fuzz(func(t *testing.T, stream string, kind byte, size uint16) {
		whole := relay.Scanner{Format: api.Format(kind) % 7, Metadata: &relay.Metadata{}}
		whole.Scan([]byte(stream))
		cut := relay.Scanner{Format: whole.Format, Metadata: &relay.Metadata{}}
		for rest := []byte(stream); len(rest) > 0; {
			n := min(int(size)+1, len(rest))
			cut.Scan(rest[:n])
			rest = rest[n:]
			if len(cut.PartialLine) > relay.MaxLineBytes || len(cut.ErrorEvent) > relay.MaxLineBytes {
				t.Fatalf("%d bytes are kept", len(cut.PartialLine))
			}
		}
		if !bytes.Equal(cut.PartialLine, whole.PartialLine) {
			t.Errorf("kept %q in pieces, %q at once", cut.PartialLine, whole.PartialLine)
		}
		cut.PartialLine, whole.PartialLine = nil, nil
		if !reflect.DeepEqual(cut, whole) {
			t.Errorf("found %+v in pieces, %+v at once", cut, whole)
		}
	})
}

// FuzzLineWriter checks that a stream comes out as it went in, and all of it that ends in a line
// end at once.
func FuzzLineWriter(f *testing.F) {
	f.Add(goodStream, uint8(3), 100)
	f.Add("no line end at all, and more than fits", uint8(5), 7)
	f.Add("\n\n\n", uint8(1), 0)
	f.Add("event: a\rdata: b\r\revent: c\r\ndata: d\r\n\r\n", uint8(0), 3)
	f.Add("event: a\ndata: b\n\nevent: c\nevent: d\n\n", uint8(2), 3)
	f.Add(strings.Repeat("x", 100)+"\nabc", uint8(40), 50)
	f.Fuzz(func(t *testing.T, stream string, size uint8, head int) {
		var out bytes.Buffer
		const room = 32
		l := relay.LineWriter{To: &out, Chunks: &sync.Pool{New: func() any { b := make([]byte, room); return &b }}}
		head = min(max(head, 0), len(stream))
		check := func(passed int) {
			got, pending := out.String(), stream[passed-l.Pending:passed]
			rest := pending
			if strings.HasPrefix(rest, "event:") {
				if _, next := relay.LineEnd([]byte(rest)); next <= len(rest) {
					rest = rest[next:]
				}
			}
			if got != stream[:passed-l.Pending] || strings.ContainsAny(rest, "\r\n") || l.Pending >= room {
				t.Fatalf("of %q came %q, and %q is kept", stream[:passed], got, pending)
			}
		}
		l.WriteBeginning([]byte(stream[:head]))
		check(head)
		for at := head; at < len(stream); check(at) {
			n := copy(l.FreeSpace(), stream[at:min(len(stream), at+int(size)+1)])
			l.WriteCompleteLines(n)
			at += n
		}
		if l.FlushPending(); out.String() != stream {
			t.Errorf("%q came out as %q", stream, out.String())
		}
	})
}

func TestKeepAliveCommentsBetweenEvents(t *testing.T) {
	for _, c := range []struct {
		parts   []string
		between bool
	}{
		{nil, true},
		{[]string{"data: x\n\n"}, true},
		{[]string{"data: x\r\n\r\n"}, true},
		{[]string{"data: x\n", "\n"}, true},
		{[]string{"data: x\r\r"}, true},
		{[]string{"data: x\r", "\r"}, true},
		{[]string{"data: x\r"}, false},
		{[]string{"data: x\r\n\r"}, false}, // a line feed may follow
		{[]string{"data: x\r\n\r", "\n"}, true},
		{[]string{"data: x\r\n", "\r\n"}, true},
		{[]string{"data: x\n\n", "data: y\n"}, false},
		{[]string{"event: x\n"}, true}, // it is withheld
		{[]string{"data: " + strings.Repeat("x", 40)}, false},
		{[]string{"data: " + strings.Repeat("x", 40), "\n"}, false},
		{[]string{"data: " + strings.Repeat("x", 40), "\n", "\n"}, true},
	} {
		var out strings.Builder
		l := relay.LineWriter{To: &out, Chunks: &sync.Pool{New: func() any { b := make([]byte, 32); return &b }}}
		for _, part := range c.parts {
			for part != "" {
				n := copy(l.FreeSpace(), part)
				part = part[n:]
				l.WriteCompleteLines(n)
			}
		}
		l.WriteKeepAlive(relay.KeepAliveComment)
		if got := strings.HasSuffix(out.String(), relay.KeepAliveComment); got != c.between {
			t.Errorf("after %q: a comment %v", c.parts, got)
		}
	}
}

// messagesBegin is the first event of a stream of /v1/messages, with its usage;
// messagesEnd is what comes after the content.
func messagesBegin(usage string) string {
	return "event: message_start\n" + `data: {"type":"message_start","message":{"id":"c","type":"message","role":"assistant","content":[],` +
		`"model":"m","stop_reason":null,"stop_sequence":null,"usage":` + usage + `}}` + "\n\n"
}

func messagesEnd(stopReason, usage string) string {
	return "event: content_block_stop\n" + `data: {"type":"content_block_stop","index":0}` + "\n\n" +
		"event: message_delta\n" + `data: {"type":"message_delta","delta":{"stop_reason":` + stopReason + `,"stop_sequence":null},"usage":` +
		usage + `}` + "\n\n" +
		"event: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n"
}

const messagesContent = "event: content_block_start\n" +
	`data: {"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}` + "\n\n" +
	"event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hello"},"index":0}` + "\n\n"

// TestMessagesUsage checks what a request costs its key, and what is counted of it,
// where a part of its prompt came from the cache.
func TestMessagesUsage(t *testing.T) {
	whole := func(usage string) string {
		return answered("200 OK", `{"id":"c","type":"message","role":"assistant","content":[{"type":"text","text":"Hello"}],"model":"m",`+
			`"stop_reason":"end_turn","usage":`+usage+`}`)
	}
	const cached = `{"input_tokens":27,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":384}`
	for _, c := range []struct {
		name, says string
		cached     int // tokens
	}{
		{"whole", whole(cached), 384},
		{"whole, a part newly cached", whole(`{"input_tokens":27,"output_tokens":4,"cache_creation_input_tokens":288,` +
			`"cache_read_input_tokens":96}`), 96},
		{"whole, cache not told", whole(`{"input_tokens":411,"output_tokens":4}`), 0},
		{"whole, cache null", whole(`{"input_tokens":411,"output_tokens":4,"cache_creation_input_tokens":null,"cache_read_input_tokens":null}`),
			0},
		{"stream", streamed(messagesBegin(`{"input_tokens":411,"output_tokens":0}`), messagesContent, messagesEnd(`"end_turn"`, cached)), 384},
		{"stream that tells the cache at once", streamed(messagesBegin(strings.Replace(cached, `"output_tokens":4`, `"output_tokens":1`, 1)),
			messagesContent, messagesEnd(`"end_turn"`, `{"output_tokens":4}`)), 384},
		{"stream, cache not told", streamed(messagesBegin(`{"input_tokens":411,"output_tokens":0}`), messagesContent,
			messagesEnd(`"end_turn"`, `{"input_tokens":411,"output_tokens":4}`)), 0},
		{"stream that corrects itself", streamed(messagesBegin(`{"input_tokens":500,"output_tokens":0}`), messagesContent,
			messagesEnd(`"end_turn"`, cached)), 384},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serve(t, withKeys(keyOf("a", nil)), &replica{script: always(c.says)})
			body := fmt.Sprintf(`{"model":"m","max_tokens":4,"messages":[{"role":"user","content":%q}]}`,
				strings.Repeat("What do you make of it? ", 85))
			if resp, answer := f.post("/v1/messages", body, bearer("a")...); resp.StatusCode != 200 {
				t.Fatalf("got %d %s", resp.StatusCode, answer)
			}
			f.awaitMetric(`warmroute_key_prompt_tokens_total{key="a"} 411`)
			f.awaitMetric(`warmroute_key_output_tokens_total{key="a"} 4`)
			source := "reported"
			if c.cached == 0 {
				source = "predicted"
			}
			f.awaitMetric(fmt.Sprintf(`warmroute_prompt_tokens_total{backend="r0",cached_tokens=%q,model="m"} 411`, source))
			f.awaitMetric(fmt.Sprintf(`warmroute_cached_tokens_total{backend="r0",cached_tokens=%q,model="m"} %d`, source, c.cached))
		})
	}
}
