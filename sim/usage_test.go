package sim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/sim/engine"
)

// messagesUsage is what a message said of its prompt.
type messagesUsage struct{ input, created, read int64 }

func readMessagesUsage(v gjson.Result) messagesUsage {
	return messagesUsage{v.Get("input_tokens").Int(), v.Get("cache_creation_input_tokens").Int(), v.Get("cache_read_input_tokens").Int()}
}

func (u messagesUsage) prompt() int64 { return u.input + u.created + u.read }

// TestMessagesUsage compares the figures of /v1/messages with those of a chat with
// the same prompt, as a real vLLM gave them and as the simulated replica does.
func TestMessagesUsage(t *testing.T) {
	const blockSize = 32
	s := start(t, Config{Model: "tiny", Engine: engine.Config{BlockSize: blockSize, KVTokens: 16384, Speed: 1000}})
	answers := map[string]func(name string) string{
		"vLLM 0.32": func(name string) string {
			raw, err := os.ReadFile(filepath.Join("testdata/vllm-0.32", name+".http"))
			if err != nil {
				t.Fatal(err)
			}
			return string(raw)
		},
		"simulated": func(name string) string {
			raw, err := os.ReadFile(filepath.Join("testdata/vllm-0.32", name+".http"))
			if err != nil {
				t.Fatal(err)
			}
			request, _, _ := strings.Cut(string(raw), "\n=== answer ===\n")
			return string(exchange(t, s, []byte(request)).body)
		},
	}
	for what, answer := range answers {
		t.Run(what, func(t *testing.T) {
			usage := func(name, before string) gjson.Result {
				text := answer(name)
				return gjson.Parse(text[strings.LastIndex(text, before)+len(before):])
			}
			uncached := readMessagesUsage(usage("messages-uncached", `"usage":`))
			cached := readMessagesUsage(usage("messages-cached", `"usage":`))
			chat := usage("messages-cached-chat", `"usage":`)
			stream := answer("messages-cached-stream")
			_, begin, _ := strings.Cut(stream, `"usage":`)
			first := readMessagesUsage(gjson.Parse(begin))
			last := readMessagesUsage(gjson.Parse(stream[strings.LastIndex(stream, `"usage":`)+len(`"usage":`):]))

			prompt, hit := chat.Get("prompt_tokens").Int(), chat.Get("prompt_tokens_details.cached_tokens").Int()
			full := prompt / blockSize * blockSize
			if hit != full || cached != (messagesUsage{prompt - hit, 0, hit}) {
				t.Errorf("cached: %+v, where a chat has %d tokens, %d of them cached", cached, prompt, hit)
			}
			if uncached.prompt() != prompt || uncached.created != full-uncached.read || uncached.created == 0 {
				t.Errorf("not cached: %+v, where a chat has %d tokens", uncached, prompt)
			}
			if first != (messagesUsage{input: prompt}) || last != cached {
				t.Errorf("a stream begins with %+v and ends with %+v; a whole message has %+v", first, last, cached)
			}
		})
	}
}

func TestMessagesUsageWithoutTokenDetails(t *testing.T) {
	s := start(t, Config{NoTokenDetails: true, Engine: fast})
	_, body := post(t, s, "/v1/messages", `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"`+strings.Repeat("word ", 100)+`"}]}`)
	u := gjson.Get(body, "usage")
	if u.Get("input_tokens").Int() < 100 || u.Get("cache_read_input_tokens").Exists() || u.Get("cache_creation_input_tokens").Exists() {
		t.Errorf("usage %s", u.Raw)
	}
}
