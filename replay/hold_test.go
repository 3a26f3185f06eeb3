package replay

import (
	"context"
	"testing"
	"time"

	"warmroute/router"
)

// Documents of 20,000 tokens on caches of 60,000: which requests fit beside each
// other is all that matters. Sent at once, they wait in engines' queues for
// room, behind whoever came first, and push out the documents that others are
// to be asked about.
func TestHoldingKeepsLongPromptsFromBlockingCaches(t *testing.T) {
	mean := func(hold router.QueueSettings) float64 {
		s := Scenario{
			Backends: 4, KVTokens: 60_000, Policy: "prefix", Hold: hold, Seed: 1,
			Workload: Documents{Load: 0.9},
		}
		got, err := s.Run(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if got.Lost > 0 {
			t.Errorf("%d requests lost", got.Lost)
		}
		return got.TTFTMean
	}
	held, sent := mean(router.QueueSettings{Requests: 1000, Timeout: time.Hour}), mean(router.QueueSettings{})
	t.Logf("mean TTFT %.1f s, without an admission queue %.1f s", held, sent)
	if held > 0.8*sent {
		t.Errorf("mean TTFT %.1f s with an admission queue and %.1f s without", held, sent)
	}
}
