package proxy

import (
	"reflect"
	"strings"
	"testing"

	"warmroute/proxy/api"
	"warmroute/proxy/relay"
)

func TestResponseMetadata(t *testing.T) {
	long := strings.Repeat("long ", relay.MaxLineBytes/4)
	of := func(id string, reasons ...string) relay.Metadata {
		return relay.Metadata{ID: id, Model: "m", FinishReasons: reasons}
	}
	for _, c := range []struct {
		name   string
		format api.Format
		data   string // a body, or a stream
		want   relay.Metadata
	}{
		{"chat", api.ChatFormat, `{"id":"chatcmpl-1","model":"m","choices":[{"index":0,"message":{"content":"\"finish_reason\":\"x\""},` +
			`"finish_reason":"tool_calls"}]}`, of("chatcmpl-1", "tool_calls")},
		{"chat with two choices", api.ChatFormat, `{"id":"1","model":"m","choices":[{"index":1,"finish_reason":"length"},` +
			`{"index":0,"finish_reason":"stop"}]}`, of("1", "stop", "length")},
		{"tokens", api.TokensFormat, `{"request_id":"r","choices":[{"index":0,"token_ids":[1],"finish_reason":"stop"}]}`,
			relay.Metadata{ID: "r", FinishReasons: []string{"stop"}}},
		{"beginning of a chat", api.ChatFormat, `{"id":"1","model":"m","choices":[{"message":{"content":"finish`, of("1")},
		{"invalid reasons", api.ChatFormat, `{"id":1,"model":["m"],"choices":[{"index":0,"finish_reason":"a sentence"},` +
			`{"index":0,"finish_reason":null},{"index":-1,"finish_reason":"stop"},{"index":99,"finish_reason":"stop"},` +
			`{"index":0,"finish_reason":"` + strings.Repeat("x", 33) + `"}]}`, relay.Metadata{}},
		{"embeddings", api.PlainFormat, `{"id":"embd-1","model":"m","data":[]}`, of("embd-1")},
		{"no object", api.PlainFormat, `RIFF`, relay.Metadata{}},
		{"response", api.ResponsesFormat, `{"id":"resp_1","model":"m","status":"completed"}`, of("resp_1", "completed")},
		{"incomplete response", api.ResponsesFormat, `{"id":"resp_1","model":"m","status":"incomplete",` +
			`"incomplete_details":{"reason":"max_output_tokens"}}`, of("resp_1", "max_output_tokens")},
		{"incomplete without a reason", api.ResponsesFormat, `{"status":"incomplete","incomplete_details":null}`,
			relay.Metadata{FinishReasons: []string{"incomplete"}}},
		{"response in the background", api.ResponsesFormat, `{"id":"resp_1","status":"queued"}`, relay.Metadata{ID: "resp_1"}},
		{"message", api.MessagesFormat, `{"id":"msg_1","model":"m","stop_reason":"end_turn"}`, of("msg_1", "end_turn")},

		{"stream of a chat", api.ChatFormat,
			`data: {"id":"1","model":"m","choices":[{"index":0,"delta":{"role":"assistant"}}]}` + "\n\n" + hello +
				`data: {"id":"1","model":"m","choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}` + "\n\n" +
				`data: {"id":"1","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}` + "\n\n" + doneLine,
			of("1", "length", "stop")},
		{"stream of a response", api.ResponsesFormat, "event: response.created\n" +
			`data: {"type":"response.created","response":{"id":"resp_1","model":"m","status":"in_progress"}}` + "\n\n" +
			`data: {"type":"response.output_text.delta","delta":"\"response\":"}` + "\n\n" +
			`data: {"type":"response.completed","response":{"id":"resp_1","model":"m","status":"completed"}}` + "\n\n",
			of("resp_1", "completed")},
		{"stream of a response with long instructions", api.ResponsesFormat, "event: response.created\n" +
			`data: {"type":"response.created","response":{"id":"resp_1","instructions":"` + long + `","model":"m","status":"in_progress"}}` + "\n\n",
			relay.Metadata{ID: "resp_1"}},
		{"stream of a message", api.MessagesFormat,
			`data: {"type":"message_start","message":{"id":"msg_1","model":"m","stop_reason":null}}` + "\n\n" +
				`data: {"type":"content_block_delta","delta":{"text":"\"stop_reason\""}}` + "\n\n" +
				`data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"}}` + "\n\n", of("msg_1", "max_tokens")},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got relay.Metadata
			if strings.Contains(c.data, "data: ") {
				s := relay.Scanner{Format: c.format, Metadata: &got}
				s.Scan([]byte(c.data))
			} else {
				got.AddBody(c.format, []byte(c.data))
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
	(*relay.Metadata)(nil).AddBody(api.ChatFormat, []byte(whole)) // of a request without a trace
}

func FuzzResponseMetadata(f *testing.F) {
	f.Add(whole, byte(api.ChatFormat))
	f.Add(`{"id":"resp_1","status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}`, byte(api.ResponsesFormat))
	f.Add(`{"id":"msg_1","stop_reason":"end_turn"}`, byte(api.MessagesFormat))
	f.Fuzz(func(t *testing.T, body string, kind byte) {
		var m relay.Metadata
		m.AddBody(api.Format(kind)%7, []byte(body))
		if len(m.FinishReasons) > 16 {
			t.Errorf("%d finish reasons", len(m.FinishReasons))
		}
		for _, reason := range m.FinishReasons {
			if len(reason) > 32 || strings.ContainsAny(reason, " \"{") {
				t.Errorf("finish reason %q", reason)
			}
		}
	})
}
