package proxy

import (
	"fmt"
	"strings"
	"testing"
)

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
			f.counts(`warmroute_key_prompt_tokens_total{key="a"} 411`)
			f.counts(`warmroute_key_completion_tokens_total{key="a"} 4`)
			f.counts(`warmroute_prompt_tokens_total{backend="r0",model="m"} 411`)
			f.counts(fmt.Sprintf(`warmroute_observed_cached_tokens_total{backend="r0",model="m"} %d`, c.cached))
		})
	}
}
