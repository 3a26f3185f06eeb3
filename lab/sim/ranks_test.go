package sim

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"warmroute/lab/sim/engine"
)

// postToRank sends a short chat with a header X-data-parallel-rank, unless rank is empty.
func postToRank(t *testing.T, s *Server, rank string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, s.URL()+"/v1/chat/completions",
		strings.NewReader(
			`{"messages":[{"role":"user","content":"Hello to a rank of yours, whichever it is."}],"max_tokens":2,"ignore_eos":true}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if rank != "" {
		req.Header.Set("X-data-parallel-rank", rank)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestDataParallelRanks(t *testing.T) {
	s := start(t, Config{Ranks: 3, Engine: engine.Config{Speed: 1000, KVTokens: 1600}})
	for range 3 { // one after the other, to idle engines in turn
		postToRank(t, s, "")
	}
	for _, rank := range []string{"2", "2", "not a number"} {
		if status, body := postToRank(t, s, rank); status != http.StatusOK {
			t.Errorf("rank %q: status %d, %s", rank, status, body)
		}
	}
	for _, rank := range []string{"3", "-1"} {
		status, body := postToRank(t, s, rank)
		if want := "data_parallel_rank " + rank + " is out of range [0, 3)."; status != http.StatusBadRequest || !strings.Contains(body, want) {
			t.Errorf("rank %s: status %d, %s, want a 400 with %q", rank, status, body, want)
		}
	}
	metrics := string(s.formatMetrics())
	for _, want := range []string{
		// One each, then one to the first engine, whose turn it was again.
		`vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"} 2.0`,
		`vllm:request_success_total{engine="1",finished_reason="length",model_name="sim"} 1.0`,
		`vllm:request_success_total{engine="2",finished_reason="length",model_name="sim"} 3.0`,
		`vllm:generation_tokens_total{engine="2",model_name="sim"} 6.0`,
		`vllm:num_requests_running{engine="1",model_name="sim"} 0.0`,
		`engine="2",gpu_memory_utilization="0.92",kv_cache_size_tokens="1600",mamba_block_size="None",mamba_cache_mode="none",` +
			`num_cpu_blocks="None",num_gpu_blocks="300"`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
	if n := strings.Count(metrics, "# TYPE vllm:num_requests_running "); n != 1 {
		t.Errorf("num_requests_running is declared %d times, want once for all engines", n)
	}
	if !s.ResetPrefixCache(false) {
		t.Error("the caches of idle engines were not reset")
	}
}

func TestRankNumbersOfBothFrontEnds(t *testing.T) {
	for _, c := range []struct {
		name     string
		rank     RankConfig
		accepted []string // for the engine labeled 4, if any
		refusal  string   // of 65534
	}{
		{"Python", RankConfig{First: 2}, []string{"2"}, "data_parallel_rank 65534 is out of range [0, 4)."},
		{"Rust", RankConfig{First: 2, Rust: true}, []string{"4"},
			"data parallel rank 65534 is not connected to this frontend; connected ranks: [2, 3, 4, 5]"},
		{"ignored", RankConfig{First: 2, Ignored: true}, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, Config{Ranks: 4, Rank: c.rank, Engine: engine.Config{Speed: 1000, KVTokens: 1600}})
			for _, rank := range c.accepted {
				if status, body := postToRank(t, s, rank); status != http.StatusOK ||
					!strings.Contains(string(s.formatMetrics()), `vllm:generation_tokens_total{engine="4",model_name="sim"} 2.0`) {
					t.Errorf("rank %s: status %d, %s", rank, status, body)
				}
			}
			status, body := postToRank(t, s, "65534")
			if refused := status == http.StatusBadRequest; refused != (c.refusal != "") || !strings.Contains(body, c.refusal) {
				t.Errorf("status %d, %s, want %q", status, body, c.refusal)
			}
		})
	}
}

func TestScaleRanks(t *testing.T) {
	s := start(t, Config{Ranks: 2, Rank: RankConfig{Spare: 1}, Engine: engine.Config{Speed: 1000, KVTokens: 1600}})
	if status, _ := postToRank(t, s, "2"); status != http.StatusBadRequest {
		t.Errorf("status %d of a spare rank", status)
	}
	if err := s.ScaleRanks(4); err == nil {
		t.Error("scaled to more ranks than there are")
	}
	if err := s.ScaleRanks(3); err != nil {
		t.Fatal(err)
	}
	if status, body := postToRank(t, s, "2"); status != http.StatusOK || s.RankStats()[2].GenerationTokens != 2 {
		t.Errorf("status %d, %s", status, body)
	}
	if n := strings.Count(string(s.formatMetrics()), "vllm:num_requests_running{"); n != 3 || s.CountRanks() != 3 {
		t.Errorf("%d ranks in the metrics", n)
	}
}
