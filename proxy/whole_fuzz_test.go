package proxy

import (
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/router/prompt"
)

// Whatever a replica answers, reading it for an abort, its usage and its text ends
// well, and counts are counts.
func FuzzWholeAnswer(f *testing.F) {
	f.Add(whole, byte(chatFormat))
	f.Add(wholeAbort, byte(chatFormat))
	f.Add(`{"choices":[{"text":"x","finish_reason":"abort"}]}`, byte(completionFormat))
	f.Add(`{"choices":{"finish_reason":"abort"},"usage":[]}`, byte(chatFormat))
	f.Add(`{"usage":{"input_tokens":-1e400,"output_tokens":9223372036854775808,"input_tokens_details":{"cached_tokens":"7"}}}`, byte(responsesFormat))
	f.Add(`{"usage":{"cache_read_input_tokens":1.5e300,"input_tokens":true}}`, byte(messagesFormat))
	f.Add(strings.Repeat("[", 10_000), byte(chatFormat))
	f.Add(`{"choices":`+strings.Repeat(`[{"message":`, 1000), byte(chatFormat))
	var asked prompt.Prompt
	if err := asked.Parse(prompt.Chat, []byte(askWhole)); err != nil {
		f.Fatal(err)
	}
	asked.Blocks(nil, "m", 256) // what a reply's blocks follow
	f.Fuzz(func(t *testing.T, body string, kind byte) {
		shape := format(kind) % 5
		if aborted(shape, []byte(body)) && !strings.Contains(body, "abort") {
			t.Error("an abort that is not there")
		}
		var u usage
		u.read(gjson.Get(body, "usage"), shape)
		for _, n := range []int{u.promptTokens, u.cachedTokens, u.answerTokens} {
			if n < 0 {
				t.Errorf("%+v", u)
			}
		}
		var reply prompt.Reply
		if !reply.Begin(&asked) {
			t.Fatal("the reply to a plain prompt is not followed")
		}
		reply.Whole([]byte(body))
		if blocks := reply.End(); len(blocks) > 1024 {
			t.Errorf("%d blocks", len(blocks))
		}
	})
}
