package sim

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/sim/engine"
)

// TestTwoThousandStreamsAtOnce makes tokens faster than they can be written, so
// that they are joined: none may be lost.
func TestTwoThousandStreamsAtOnce(t *testing.T) {
	const streams, tokens = 2000, 24
	s := start(t, Config{Engine: engine.Config{MaxSeqs: streams, Speed: 5}})
	transport := &http.Transport{MaxIdleConns: streams}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	var all sync.WaitGroup
	for i := range streams {
		all.Go(func() {
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Question %d"}],"max_tokens":%d,"ignore_eos":true,`+
				`"stream":true,"stream_options":{"include_usage":true}}`, i, tokens)
			resp, err := client.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			text, last, counted := "", "", int64(0)
			lines := bufio.NewScanner(resp.Body)
			for lines.Scan() {
				if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
					last = data
					text += gjson.Get(data, "choices.0.delta.content").Str
					counted = max(counted, gjson.Get(data, "usage.completion_tokens").Int())
				}
			}
			if len(text) != tokens*bytesPerToken || counted != tokens || last != "[DONE]" {
				t.Errorf("stream %d: %d bytes of text, usage of %d tokens, ends with %q, error %v", i, len(text), counted, last, lines.Err())
			}
		})
	}
	all.Wait()
	if st := s.Stats(); st.Running != 0 || st.Waiting != 0 || st.GenerationTokens != streams*tokens {
		t.Errorf("%d running, %d waiting, %d tokens generated, want 0, 0 and %d", st.Running, st.Waiting, st.GenerationTokens, streams*tokens)
	}
}
