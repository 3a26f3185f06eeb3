package proxy

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
)

func TestEventScanner(t *testing.T) {
	chat := func(choice string) string { return `data: {"id":"c","choices":[` + choice + `]}` + "\n\n" }
	type found struct {
		events                          int
		content, finished, aborted, end bool
		unexplained                     bool
		failed                          int // status; 0: none
		usage                           tokenUsage
	}
	cases := []struct {
		name   string
		format format
		stream string
		want   found
	}{
		{"comments", chatFormat, ": keep-alive\n\n:\n\n", found{}},
		{"empty data", chatFormat, "data:\n\ndata: \n\n", found{}},
		{"role", chatFormat, role, found{events: 1}},
		{"content", chatFormat, role + hello, found{events: 2, content: true}},
		{"no space after the colon", chatFormat, strings.ReplaceAll(role+hello+doneLine, "data: ", "data:"), found{events: 2, content: true, end: true}},
		{"CRLF", chatFormat, strings.ReplaceAll(hello+doneLine, "\n", "\r\n"), found{events: 1, content: true, end: true}},
		{"CR", chatFormat, strings.ReplaceAll(hello+doneLine, "\n", "\r"), found{events: 1, content: true, end: true}},
		{"reasoning", chatFormat, chat(`{"delta":{"reasoning":"hm"}}`), found{events: 1, content: true}},
		{"reasoning_content", chatFormat, chat(`{"delta":{"role":"assistant","reasoning_content":"hm","content":null}}`), found{events: 1, content: true}},
		{"tool call", chatFormat, chat(`{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}}`), found{events: 1, content: true}},
		{"no tool call", chatFormat, chat(`{"delta":{"role":"assistant","content":"","tool_calls":[],"refusal":null}}`), found{events: 1}},
		{"second choice", chatFormat, chat(`{"index":0,"delta":{"content":""}},{"index":1,"delta":{"content":"x"}}`), found{events: 1, content: true}},
		{"stop", chatFormat, role + stop, found{events: 2, finished: true}},
		{"abort", chatFormat, role + abort + doneLine, found{events: 2, aborted: true, end: true}},
		{"abort after content", chatFormat, hello + abort, found{events: 2, content: true, aborted: true}},
		{"end without a word of why", chatFormat, role + counted + doneLine, found{events: 2, aborted: true, end: true, usage: tokenUsage{true, true, 12, 8, 3}}},
		{"nothing but the end", completionFormat, doneLine, found{aborted: true, end: true}},
		{"usage", chatFormat, role + counted, found{events: 2, usage: tokenUsage{true, true, 12, 8, 3}}},
		{"usage: null", chatFormat, `data: {"choices":[],"usage":null}` + "\n\n", found{events: 1}},
		{"usage that grows", chatFormat, hello + strings.Replace(counted, `completion_tokens":3`, `completion_tokens":1`, 1) + counted, found{events: 3, content: true, usage: tokenUsage{true, true, 12, 8, 3}}},
		{"usage in what was said", chatFormat, chat(`{"delta":{"content":"\"usage\":{\"prompt_tokens\":9}"}}`), found{events: 1, content: true}},
		{"error", chatFormat, dead + doneLine, found{end: true, failed: 500}},
		{"client's error", chatFormat, tooLong + doneLine, found{end: true, failed: 400}},
		{"compact error", chatFormat, `data: {"error":{"message":"x","code":503}}` + "\n\n", found{failed: 503}},
		{"error without a code", chatFormat, `data: {"error":{"message":"x"}}` + "\n\n", found{failed: 500}},
		{"error with an odd code", chatFormat, `data: {"error":{"message":"x","code":"7"}}` + "\n\n", found{failed: 500}},
		{"no JSON", chatFormat, "data: hello\n\n", found{events: 1}},
		{"text", completionFormat, chat(`{"text":"Hi"}`), found{events: 1, content: true}},
		{"empty text", completionFormat, chat(`{"text":"","finish_reason":"length"}`), found{events: 1, finished: true}},
		{"aborted text", completionFormat, chat(`{"text":"","finish_reason":"abort"}`), found{events: 1, aborted: true}},
		{"token ids", tokensFormat, chat(`{"index":0,"finish_reason":null,"token_ids":[1,2]}`), found{events: 1, content: true}},
		{"no token ids", tokensFormat, chat(`{"index":0,"finish_reason":"stop","token_ids":[]}`), found{events: 1, finished: true}},
		{"token ids, aborted", tokensFormat, chat(`{"token_ids":[1]}`) + chat(`{"token_ids":[],"finish_reason":"abort"}`) + doneLine, found{events: 2, content: true, aborted: true, end: true}},
		{"usage of token ids", tokensFormat, chat(`{"token_ids":[1]}`) + counted, found{events: 2, content: true, usage: tokenUsage{true, true, 12, 8, 3}}},
		{"response begins", responsesFormat, `data: {"type":"response.created","response":{"usage":null}}` + "\n\n" + `data: {"type":"response.in_progress"}` + "\n\n", found{}},
		{"response", responsesFormat, "event: x\n" + `data: {"type":"response.output_item.added"}` + "\n\n" + `data: {"delta":"Hi","type":"response.output_text.delta"}` + "\n\n", found{events: 2, content: true}},
		{"response ends", responsesFormat, `data: {"type":"response.completed","response":{"usage":{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}}` + "\n\n", found{events: 1, finished: true, end: true, usage: tokenUsage{true, true, 7, 4, 2}}},
		{"response is incomplete", responsesFormat, `data: {"type":"response.incomplete","response":{"status":"incomplete","usage":{"input_tokens":7,"output_tokens":2}}}` + "\n\n", found{events: 1, finished: true, end: true, usage: tokenUsage{true, false, 7, 0, 2}}},
		{"response is cancelled", responsesFormat, `data: {"type":"response.completed","response":{"status":"cancelled"}}` + "\n\n", found{events: 1, aborted: true, end: true}},
		{"response of no token", responsesFormat, `data: {"type":"response.completed","response":{"status":"completed","output":[],"usage":{"input_tokens":7,"output_tokens":0}}}` + "\n\n", found{events: 1, aborted: true, end: true, usage: tokenUsage{true, false, 7, 0, 0}}},
		{"long response", responsesFormat, "event: response.completed\n" + `data: {"response":{"output":"` + strings.Repeat("x", 2*maxLineBytes) + `","status":"completed","usage":{"input_tokens":7,"output_tokens":2}},"type":"response.completed"}` + "\n\n", found{events: 1, content: true, finished: true, end: true, usage: tokenUsage{true, false, 7, 0, 2}}},
		{"long response, cancelled", responsesFormat, "event: response.completed\n" + `data: {"response":{"output":"` + strings.Repeat("x", 2*maxLineBytes) + `","status":"cancelled","usage":null},"type":"response.completed"}` + "\n\n", found{events: 1, content: true, unexplained: true, end: true}},
		{"long event of a response", responsesFormat, "event: response.output_text.done\n" + `data: {"text":"` + strings.Repeat("x", 2*maxLineBytes) + `","type":"response.output_text.done"}` + "\n\n", found{events: 1, content: true}},
		{"response fails", responsesFormat, `data: {"code":null,"message":"x","type":"error"}` + "\n\n", found{end: true, failed: 500}},
		{"response fails before output", responsesFormat, `data: {"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}` + "\n\n", found{end: true, failed: 500}},
		{"response fails by its prompt", responsesFormat, `data: {"type":"response.failed","response":{"status":"failed","error":{"code":"invalid_prompt"}}}` + "\n\n", found{end: true, failed: 400}},
		{"response fails after content", responsesFormat, `data: {"delta":"Hi","type":"response.output_text.delta"}` + "\n\n" + `data: {"code":null,"message":"x","type":"error"}` + "\n\n", found{events: 1, content: true, end: true, failed: 500}},
		{"message begins", messagesFormat, `data: {"type":"ping"}` + "\n\n" + `data: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":0}}}` + "\n\n", found{events: 1, usage: tokenUsage{true, false, 7, 0, 0}}},
		{"message", messagesFormat, `data: {"type":"content_block_delta","delta":{"text":"Hi"}}` + "\n\n" + `data: {"type":"message_delta","usage":{"output_tokens":2,"cache_read_input_tokens":4}}` + "\n\n", found{events: 2, content: true, usage: tokenUsage{true, true, 0, 4, 2}}},
		{"message fails", messagesFormat, `data: {"type":"error","error":{"type":"overloaded_error"}}` + "\n\n", found{end: true, failed: 503}},
		{"message ends", messagesFormat, messagesContent + messagesEnd(`"end_turn"`, `{"output_tokens":2}`), found{events: 5, content: true, finished: true, end: true, usage: tokenUsage{true, false, 0, 0, 2}}},
		{"message is aborted", messagesFormat, messagesContent + messagesEnd("null", `{"output_tokens":2}`), found{events: 5, content: true, unexplained: true, end: true, usage: tokenUsage{true, false, 0, 0, 2}}},
		{"message of no token", messagesFormat, messagesEnd(`"end_turn"`, `{"output_tokens":0}`), found{events: 3, aborted: true, end: true, usage: tokenUsage{known: true}}},
		{"message whose reason comes late", messagesFormat, strings.TrimSuffix(messagesEnd("null", `{"output_tokens":2}`), "event: message_stop\n"+`data: {"type":"message_stop"}`+"\n\n") + messagesEnd(`"end_turn"`, `{"output_tokens":2}`), found{events: 5, finished: true, end: true, usage: tokenUsage{true, false, 0, 0, 2}}},
		{"error: null", chatFormat, strings.Replace(hello, "{", `{"error":null,`, 1) + strings.Replace(hello, "{", `{"error": null,`, 1), found{events: 2, content: true}},
		{"error: empty", chatFormat, strings.Replace(hello, "{", `{"error":"",`, 1), found{events: 1, content: true}},
		{"error: a text", chatFormat, `data: {"error":"x"}` + "\n\n", found{failed: 500}},
		{"transcript", plainFormat, `data: {"type":"transcript.text.delta","delta":"transcript.text.done"}` + "\n\n", found{events: 1, content: true}},
		{"transcript ends", plainFormat, `data: {"type":"transcript.text.done","text":"x"}` + "\n\n", found{events: 1, content: true, end: true}},
		{"transcript stops", plainFormat, "data: x\n\n" + chat(`{"delta":{"content":""},"finish_reason":"stop"}`), found{events: 2, content: true, finished: true}},
		{"anything", plainFormat, "data: x\n\n", found{events: 1, content: true}},
		{"line too long", chatFormat, chat(`{"delta":{"content":"` + strings.Repeat("x", maxLineBytes) + `"}}`), found{events: 1, content: true}},
		{"comment too long", chatFormat, ":" + strings.Repeat("x", maxLineBytes) + "\n\n" + role, found{events: 1}},
		{"line without an end", chatFormat, strings.TrimSuffix(hello, "\n\n"), found{}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := eventScanner{format: c.format}
			s.scan([]byte(c.stream))
			got := found{s.events, s.content, s.finished, s.aborted, s.done, s.unexplained, 0, s.usage}
			if s.errorEvent != nil {
				got.failed = s.errorEventStatus()
			}
			if got != c.want {
				t.Errorf("found %+v\nwant  %+v", got, c.want)
			}
		})
	}
}

func FuzzEventScanner(f *testing.F) {
	f.Add(goodStream, byte(chatFormat), uint16(3))
	f.Add(role+abort+doneLine, byte(chatFormat), uint16(1))
	f.Add(dead+doneLine, byte(completionFormat), uint16(100))
	f.Add("data: {\"choices\":[{\"token_ids\":[1]}]}\n\n"+doneLine, byte(tokensFormat), uint16(5))
	f.Add("data: {\"type\":\"response.output_text.delta\"}\r\n\r\n:\n", byte(responsesFormat), uint16(7))
	f.Add("data: {\"sequence_number\":3}\r\rdata: {\"sequence_number\":4}\r\n\r\n", byte(storedFormat), uint16(0))
	f.Add("data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":7}}}\n\n", byte(messagesFormat), uint16(11))
	f.Add(strings.Repeat("data: x", maxLineBytes/4)+"\n"+role, byte(plainFormat), uint16(4096))
	f.Fuzz(func(t *testing.T, stream string, kind byte, size uint16) {
		whole := eventScanner{format: format(kind) % 7}
		whole.scan([]byte(stream))
		cut := eventScanner{format: whole.format}
		for rest := []byte(stream); len(rest) > 0; {
			n := min(int(size)+1, len(rest))
			cut.scan(rest[:n])
			rest = rest[n:]
			if len(cut.partialLine) > maxLineBytes || len(cut.errorEvent) > maxLineBytes {
				t.Fatalf("%d bytes are kept", len(cut.partialLine))
			}
		}
		if !bytes.Equal(cut.partialLine, whole.partialLine) {
			t.Errorf("kept %q in pieces, %q at once", cut.partialLine, whole.partialLine)
		}
		cut.partialLine, whole.partialLine = nil, nil
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
		l := lineWriter{to: &out, chunks: &sync.Pool{New: func() any { b := make([]byte, room); return &b }}}
		head = min(max(head, 0), len(stream))
		check := func(passed int) {
			got, pending := out.String(), stream[passed-l.pending:passed]
			rest := pending
			if strings.HasPrefix(rest, "event:") {
				if _, next := lineEnd([]byte(rest)); next <= len(rest) {
					rest = rest[next:]
				}
			}
			if got != stream[:passed-l.pending] || strings.ContainsAny(rest, "\r\n") || l.pending >= room {
				t.Fatalf("of %q came %q, and %q is kept", stream[:passed], got, pending)
			}
		}
		l.writeBeginning([]byte(stream[:head]))
		check(head)
		for at := head; at < len(stream); check(at) {
			n := copy(l.freeSpace(), stream[at:min(len(stream), at+int(size)+1)])
			l.writeCompleteLines(n)
			at += n
		}
		if l.flushPending(); out.String() != stream {
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
		l := lineWriter{to: &out, chunks: &sync.Pool{New: func() any { b := make([]byte, 32); return &b }}}
		for _, part := range c.parts {
			for part != "" {
				n := copy(l.freeSpace(), part)
				part = part[n:]
				l.writeCompleteLines(n)
			}
		}
		l.writeKeepAlive(keepAliveComment)
		if got := strings.HasSuffix(out.String(), keepAliveComment); got != c.between {
			t.Errorf("after %q: a comment %v", c.parts, got)
		}
	}
}

// messagesBegin is the first event of a stream of /v1/messages, with its usage;
// messagesEnd is what comes after the content.
func messagesBegin(usage string) string {
	return "event: message_start\n" + `data: {"type":"message_start","message":{"id":"c","type":"message","role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,"usage":` + usage + `}}` + "\n\n"
}

func messagesEnd(stopReason, usage string) string {
	return "event: content_block_stop\n" + `data: {"type":"content_block_stop","index":0}` + "\n\n" +
		"event: message_delta\n" + `data: {"type":"message_delta","delta":{"stop_reason":` + stopReason + `,"stop_sequence":null},"usage":` + usage + `}` + "\n\n" +
		"event: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n"
}

const messagesContent = "event: content_block_start\n" + `data: {"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}` + "\n\n" +
	"event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hello"},"index":0}` + "\n\n"

// TestMessagesUsage checks what a request costs its key, and what is counted of it,
// where a part of its prompt came from the cache.
func TestMessagesUsage(t *testing.T) {
	whole := func(usage string) string {
		return answered("200 OK", `{"id":"c","type":"message","role":"assistant","content":[{"type":"text","text":"Hello"}],"model":"m","stop_reason":"end_turn","usage":`+usage+`}`)
	}
	const cached = `{"input_tokens":27,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":384}`
	for _, c := range []struct {
		name, says string
		cached     int // tokens
	}{
		{"whole", whole(cached), 384},
		{"whole, a part newly cached", whole(`{"input_tokens":27,"output_tokens":4,"cache_creation_input_tokens":288,"cache_read_input_tokens":96}`), 96},
		{"whole, cache not told", whole(`{"input_tokens":411,"output_tokens":4}`), 0},
		{"whole, cache null", whole(`{"input_tokens":411,"output_tokens":4,"cache_creation_input_tokens":null,"cache_read_input_tokens":null}`), 0},
		{"stream", streamed(messagesBegin(`{"input_tokens":411,"output_tokens":0}`), messagesContent, messagesEnd(`"end_turn"`, cached)), 384},
		{"stream that tells the cache at once", streamed(messagesBegin(strings.Replace(cached, `"output_tokens":4`, `"output_tokens":1`, 1)), messagesContent, messagesEnd(`"end_turn"`, `{"output_tokens":4}`)), 384},
		{"stream, cache not told", streamed(messagesBegin(`{"input_tokens":411,"output_tokens":0}`), messagesContent, messagesEnd(`"end_turn"`, `{"input_tokens":411,"output_tokens":4}`)), 0},
		{"stream that corrects itself", streamed(messagesBegin(`{"input_tokens":500,"output_tokens":0}`), messagesContent, messagesEnd(`"end_turn"`, cached)), 384},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serve(t, withKeys(keyOf("a", nil)), &replica{script: always(c.says)})
			body := fmt.Sprintf(`{"model":"m","max_tokens":4,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("What do you make of it? ", 85))
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
