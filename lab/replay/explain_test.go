package replay

import (
	"slices"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router"
)

// similarJobs are prompts of so many tokens, one every so often, of which the first cached ones are always the same.
func similarJobs(n, tokens, cached, output int, every time.Duration) (all jobs) {
	for i := range n {
		var c chain
		for len(c.cache) < tokens/generatedBlockTokens {
			id := uint64(i + 2)
			if len(c.cache) < cached/generatedBlockTokens {
				id = 1
			}
			c.add(id)
		}
		all = append(all, c.newJob(time.Duration(i)*every, tokens, output, generatedBlockTokens))
	}
	return all
}

// TestPredictedTTFT compares the time to the first token that Explain predicts with the median of 50 similar requests, after
// as many that it is learned from.
func TestPredictedTTFT(t *testing.T) {
	for name, tc := range map[string]struct {
		engine                 engine.Config
		tokens, cached, output int
		every                  time.Duration
	}{
		"cached, alone":       {engine.Config{}, 2048, 2048, 50, 2 * time.Second},
		"cached, beside some": {engine.Config{}, 2048, 2048, 400, 200 * time.Millisecond},
		"short, alone":        {engine.Config{}, 512, 0, 50, 2 * time.Second},
		"uncached, alone":     {engine.Config{}, 4096, 0, 50, 2 * time.Second},
		"cached, of a fast engine": {engine.Config{
			PrefillRate: 38_500, StepTime: 5 * time.Millisecond, DecodeTime: 5 * time.Microsecond, ContextTime: 22,
		}, 2048, 2048, 50, 500 * time.Millisecond},
		"cached, of a slow engine": {engine.Config{
			PrefillRate: 2000, StepTime: 30 * time.Millisecond, DecodeTime: 100 * time.Microsecond, ContextTime: 100,
		}, 2048, 2048, 50, 5 * time.Second},
	} {
		const learned, measured = 50, 50
		s := &Scenario{Policy: "prefix", Backends: 1, Engine: tc.engine, Workload: similarJobs(learned+measured, tc.tokens, tc.cached, tc.output,
			tc.every)}
		requests, err := s.Workload.Requests(s.Backends, s.Seed)
		if err != nil {
			t.Fatal(err)
		}
		r, err := newRun(s, requests)
		if err != nil {
			t.Fatal(err)
		}
		var predicted []float64
		sent, ttft := map[*Job]time.Duration{}, []float64(nil)
		for r.ended < requests.Total {
			e := r.events.pop()
			r.now = e.at
			if e.kind == eventArrival {
				sent[e.job] = r.now
				x := r.router.Explain(router.Request{
					Backends: r.all, Blocks: e.job.Blocks, Bytes: int(float64(e.job.Prompt) * s.bytesPerToken()), Sequences: 1, Streams: true,
					Model: modelName(0),
				})
				predicted = append(predicted, x.Backends[0].TTFTSeconds)
			}
			r.handleEvent(&e)
			r.applyDecisions()
			for _, f := range r.fleet[0].requests {
				if at, waits := sent[f.job]; waits && f.started {
					delete(sent, f.job)
					ttft = append(ttft, (f.first - at).Seconds())
				}
			}
		}
		if len(ttft) != learned+measured {
			t.Fatalf("%s: %d first tokens were seen", name, len(ttft))
		}
		median := func(list []float64) float64 {
			slices.Sort(list)
			return list[len(list)/2]
		}
		is, want := median(predicted[learned:]), median(ttft[learned:])
		t.Logf("%s: predicted %.4f s, median %.4f s", name, is, want)
		if is > 2*want || is < want/2 {
			t.Errorf("%s: %.4f s were predicted, and the median of %d is %.4f s", name, is, measured, want)
		}
	}
}
