package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// simulated is a fleet of simulated replicas, in front of which nothing checks
// or polls.
func simulated(t *testing.T, n int, hold router.QueueSettings) *fleet {
	t.Helper()
	var list []*backends.Backend
	for i := range n {
		s := sim.NewServer(sim.Config{Model: "m", Engine: engine.Config{Speed: 50}})
		if err := s.Listen("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		t.Cleanup(func() {
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		list = append(list, backendAt(t, fmt.Sprintf("r%d", i), s.URL(), ""))
	}
	return newFleet(t, list, "prefix", hold, nil)
}

// answerOf puts the text of an answer together, streamed or not, and says how
// many of its prompt's tokens came from the replica's cache.
func answerOf(answer string) (text string, cached int) {
	add := func(data string) {
		for _, path := range []string{"choices.0.delta.content", "choices.0.message.content", "choices.0.text"} {
			text += gjson.Get(data, path).Str
		}
		cached = max(cached, int(gjson.Get(data, "usage.prompt_tokens_details.cached_tokens").Int()))
	}
	if !strings.HasPrefix(answer, "data:") {
		add(answer)
	}
	for line := range strings.Lines(answer) {
		if data, ok := strings.CutPrefix(line, "data: {"); ok {
			add("{" + data)
		}
	}
	return text, cached
}

func TestTheNextTurnIsKnownToHitTheAnswer(t *testing.T) {
	const blockTokens = 64
	question := strings.Repeat("What do you make of this, then? ", 60)
	chat := func(turns ...string) map[string]any {
		var messages []map[string]string
		for i, text := range turns {
			messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": text})
		}
		return map[string]any{"messages": messages}
	}
	text := func(turns ...string) map[string]any { return map[string]any{"prompt": strings.Join(turns, "")} }
	for _, c := range []struct {
		name, path string
		stream     bool
		body       func(turns ...string) map[string]any
	}{
		{"chat, streamed", "/v1/chat/completions", true, chat},
		{"chat", "/v1/chat/completions", false, chat},
		{"completion, streamed", "/v1/completions", true, text},
		{"completion", "/v1/completions", false, text},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := simulated(t, 2, router.QueueSettings{})
			ask := func(turns ...string) (answer string, predicted, observed int) {
				t.Helper()
				body := c.body(turns...)
				body["model"], body["max_tokens"], body["ignore_eos"] = "m", 500, true
				if body["stream"] = c.stream; c.stream {
					body["stream_options"] = map[string]bool{"include_usage": true}
				}
				raw, err := json.Marshal(body)
				if err != nil {
					t.Fatal(err)
				}
				resp, all := f.post(c.path, string(raw))
				matched, _, _ := strings.Cut(resp.Header.Get("X-Warmroute-Prefix-Match"), "/")
				predicted, err = strconv.Atoi(matched)
				if err != nil {
					t.Fatalf("no match in %v: %s", resp.Header, all)
				}
				answer, observed = answerOf(all)
				f.settled()
				return answer, predicted, observed
			}
			turns := []string{question}
			for n := range 3 {
				answer, predicted, observed := ask(turns...)
				if len(answer) < 1000 {
					t.Fatalf("turn %d: an answer of %d bytes", n, len(answer))
				}
				if gap := predicted - observed; gap > blockTokens || gap < -blockTokens {
					t.Errorf("turn %d: %d tokens predicted to be cached, %d were", n, predicted, observed)
				}
				if before := len(strings.Join(turns, ""))/4 - len(turns[len(turns)-1])/4; n > 0 && predicted < before-blockTokens {
					t.Errorf("turn %d: %d tokens predicted to be cached, of about %d before the question", n, predicted, before)
				}
				turns = append(turns, answer, question)
			}
		})
	}
}
