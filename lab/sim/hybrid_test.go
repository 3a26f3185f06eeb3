package sim

import (
	"strings"
	"testing"

	"warmroute/lab/sim/engine"
)

// Hybrid models as vLLM 0.32 ran them, with 48 MiB of KV cache.
var (
	qwen35 = Config{MaxModelLen: 16_384, Engine: engine.Config{
		BlockSize: 544, KVTokens: 361 * 544, StepTokens: 2048, Speed: 1000, Groups: engine.Groups{States: 3},
	}}
	gemma3 = Config{MaxModelLen: 16_384, Engine: engine.Config{
		BlockSize: 32, KVTokens: 3072 * 32, StepTokens: 2048, Speed: 1000, Groups: engine.Groups{Windows: 5, Window: 512},
	}}
)

// TestHybridCachedTokens asks with one system prompt: the second question hits nothing, and lets the third one hit.
func TestHybridCachedTokens(t *testing.T) {
	for _, cfg := range []Config{qwen35, gemma3} {
		s := start(t, cfg)
		system := strings.Repeat("You answer in few words. ", 400)
		var cached []int
		for _, question := range []string{"Who are you?", "What is that?", "How does it work?"} {
			user := strings.Repeat(question+" ", 300)
			answer := ask(t, s, `{"messages":[{"role":"system","content":"`+system+`"},{"role":"user","content":"`+user+`"}],"max_tokens":2}`)
			cached = append(cached, answer.Usage.PromptTokensDetails.CachedTokens)
		}
		shared, block := len(system)/tokenIDBytes, cfg.Engine.BlockSize
		if cached[0] != 0 || cached[1] != 0 || cached[2] <= shared-block || cached[2]%block != 0 {
			t.Errorf("%+v: cached %v of a system prompt of %d tokens", cfg.Engine.Groups, cached, shared)
		}
	}
}

// TestHybridMetrics compares the labels by which a hybrid model shows with those of vLLM.
func TestHybridMetrics(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want []string
	}{
		{qwen35, []string{
			`{block_size="544",`, `cache_hit_alignment_tokens="None"`,
			`kv_cache_size_tokens="159854",mamba_block_size="544",mamba_cache_mode="align",`,
			`num_gpu_blocks="361"`, `prefix_cache_retention_interval="0"`, `sliding_window="None"`,
		}},
		{gemma3, []string{
			`{block_size="32",`, `kv_cache_size_tokens="54887",mamba_block_size="None",mamba_cache_mode="none",`,
			`num_gpu_blocks="3072"`, `sliding_window="None"`,
		}},
	} {
		metrics := string(start(t, c.cfg).formatMetrics())
		for _, label := range c.want {
			if !strings.Contains(metrics, label) {
				t.Errorf("%+v: no %s in the metrics", c.cfg.Engine.Groups, label)
			}
		}
	}
}

func TestValidateHybrid(t *testing.T) {
	c := qwen35
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	c.Connector.Enabled, c.Engine.StepTokens = true, 500
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "connector") || !strings.Contains(err.Error(), "budget") {
		t.Errorf("error %v", err)
	}
}
