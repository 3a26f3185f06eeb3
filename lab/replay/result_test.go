package replay

import (
	"encoding/json"
	"testing"
	"time"
)

func TestSummary(t *testing.T) {
	var tally Tally
	for i := 1; i <= 100; i++ {
		tally.Add(Result{
			TTFT: time.Duration(101-i) * time.Second, E2E: time.Duration(101-i+20) * time.Second, ITL: 2 * time.Second,
			PromptTokens: 100, CachedTokens: 25, CompletionTokens: 11,
		})
	}
	tally.Add(Result{Err: "status 503"})
	tally.Add(Result{Err: "status 503"})
	tally.Add(Result{Err: "stream truncated"})

	got, err := json.Marshal(tally.Summary("prefix", 50*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"policy":"prefix","requests":100,"hit_ratio":0.25,` +
		`"ttft_mean_s":50.5,"ttft_p50_s":50,"ttft_p90_s":90,"ttft_p99_s":99,"ttft_longest_s":95.5,` +
		`"tpot_mean_s":2,"itl_mean_s":2,"e2e_mean_s":70.5,"e2e_p99_s":119,"throughput_rps":2,` +
		`"lost":3,"errors":{"status 503":2,"stream truncated":1},` +
		`"prompt_tokens":10000,"completion_tokens":1100}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestEmptySummary(t *testing.T) {
	var tally Tally
	if s := tally.Summary("prefix", 0); s.Requests != 0 || s.Lost != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestMaxOverMean(t *testing.T) {
	f := func(want float64, values ...float64) {
		t.Helper()
		if got := MaxOverMean(values); got != want {
			t.Errorf("%v: got %v, want %v", values, got, want)
		}
	}
	f(0)
	f(0, 0, 0)
	f(1, 3, 3, 3)
	f(2, 0, 4, 2, 2)
}
