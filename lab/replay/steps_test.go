package replay

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router/step"
)

// spread is an open loop of requests whose lengths are drawn from logarithmic distributions. Some continue an earlier
// prompt.
type spread struct {
	requests             int
	maxPrompt, maxOutput float64
	continued            float64 // share
}

func (w spread) Requests(_ int, seed uint64) (*Requests, error) {
	const blockTokens, remembered, minPrompt, minOutput = 64, 20, 100, 10
	draw := rand.New(rand.NewPCG(seed, 9))
	r := &Requests{BlockTokens: blockTokens, Total: w.requests}
	var earlier []chain
	at, rate := time.Duration(0), 1.
	for i := range w.requests {
		if i%20 == 0 {
			rate = drawBetween(draw, 0.3, 3)
		}
		at += drawInterval(draw, rate)
		c, tokens := chain{}, int(drawBetween(draw, minPrompt, w.maxPrompt))
		if len(earlier) > 0 && draw.Float64() < w.continued {
			c = earlier[draw.IntN(len(earlier))]
			c.names, c.cache = slices.Clone(c.names), slices.Clone(c.cache)
			tokens = tokens/10 + 1 + blockTokens*len(c.names)
		}
		output := int(drawBetween(draw, minOutput, w.maxOutput))
		for len(c.cache) < (tokens+output)/blockTokens {
			c.add(uint64(i)<<20 + uint64(len(c.cache)))
		}
		j := c.newJob(at, tokens, output, blockTokens)
		j.PromptKey = uint64(i) + 1
		r.Open = append(r.Open, j)
		if earlier = append(earlier, c); len(earlier) > remembered {
			earlier = earlier[1:]
		}
	}
	return r, nil
}

func drawBetween(draw *rand.Rand, low, high float64) float64 {
	return low * math.Exp(draw.Float64()*math.Log(high/low))
}

// drawStepEngine draws how long the steps of an engine take. What a step.Model lacks, they vary with: jitter.
func drawStepEngine(draw *rand.Rand) engine.Config {
	rate := drawBetween(draw, 1000, 100_000)
	slowness := math.Sqrt(engine.DefaultPrefillRate / rate)
	return engine.Config{
		StepTime: time.Duration(drawBetween(draw, 4e6, 25e6)), PrefillRate: rate, QuadraticDepth: drawBetween(draw, 0.5e-5, 1e-4),
		DecodeTime: time.Duration(slowness * drawBetween(draw, 5e3, 200e3)), ContextTime: time.Duration(slowness * drawBetween(draw, 20, 200)),
		PromptTokenTime: time.Duration(drawBetween(draw, 500, 3000)), StepTokens: int(drawBetween(draw, 4096, 16384)),
		Jitter: 0.2 * draw.Float64(),
	}
}

// learnedAndTrueSteps plays a workload on two engines and returns what the router has learned of their steps, and the truth.
func learnedAndTrueSteps(t *testing.T, e engine.Config, w spread, load, nonStreaming float64, seed uint64) (got, want step.Model) {
	s := Scenario{Backends: 2, Engine: e, KVTokens: 4_000_000, Policy: "prefix", NonStreaming: nonStreaming, Seed: seed}
	s.Workload = drawnWorkload{base: w, load: load, models: 1, scenario: s}
	requests, err := s.Workload.Requests(s.Backends, 1)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRun(&s, requests)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.processEvents(context.Background()); err != nil {
		t.Fatal(err)
	}
	return r.router.Estimates()[0].Step, step.Model{
		Base: e.StepTime.Seconds(), Rate: e.PrefillRate, Attention: e.QuadraticDepth,
		Sequence: e.DecodeTime.Seconds(), Context: e.ContextTime.Seconds(), PromptToken: e.PromptTokenTime.Seconds(),
	}
}

// stepErrors are relative errors, by what they are of.
type stepErrors map[string][]float64

// stepLimit bounds the errors of one thing.
type stepLimit struct {
	name          string
	median, ninth float64 // decile
}

// TestLearnedSteps draws engines, and compares what the router learns of their steps with the truth: the times of
// prefills and steps that it was not shown, and each parameter that makes up 30 % of such a time or more.
func TestLearnedSteps(t *testing.T) {
	t.Parallel()
	checkLearnedSteps(t, 40, drawStepEngine, func(world uint64) float64 { return float64(world%3) / 3 }, []stepLimit{
		{"prefill", 0.05, 0.2}, {"step", 0.05, 0.15}, {"base", 0.05, 0.2}, {"rate", 0.05, 0.2}, {"attention", 0.1, 0.25}, {"context", 0.1, 0.2},
	})
}

// Where nothing is streamed, prompts that wait hide how long they take: the rate follows from the base, as both do from
// the size of the model and of the GPU. Here they are in the usual proportion, but for a factor of two.
func TestLearnedStepsWithoutStreams(t *testing.T) {
	t.Parallel()
	draw := func(draw *rand.Rand) engine.Config {
		e := drawStepEngine(draw)
		base := 5.07e-3 * engine.DefaultPrefillRate / e.PrefillRate * drawBetween(draw, 0.5, 2)
		e.StepTime = time.Duration(base * float64(time.Second))
		return e
	}
	checkLearnedSteps(t, 40, draw, func(uint64) float64 { return 1 }, []stepLimit{
		{"step", 0.15, 0.7}, {"base", 0.05, 0.2}, {"rate", 0.5, 1},
	})
}

func checkLearnedSteps(
	t *testing.T, worlds uint64, drawEngine func(*rand.Rand) engine.Config, nonStreamingOf func(world uint64) float64, limits []stepLimit,
) {
	t.Helper()
	const clearShare = 0.3
	all := stepErrors{}
	var table strings.Builder
	fmt.Fprintf(&table, "\n load streams longest | learned/true: base rate attention sequence context API | worst prefill, step\n")
	for world := range worlds {
		draw := rand.New(rand.NewPCG(1, world))
		e := drawEngine(draw)
		w := spread{requests: 1500, maxPrompt: drawBetween(draw, 4000, 100_000), maxOutput: drawBetween(draw, 200, 2000),
			continued: draw.Float64()}
		load, nonStreaming := 0.1+0.5*draw.Float64(), nonStreamingOf(world)
		got, want := learnedAndTrueSteps(t, e, w, load, nonStreaming, world)
		relative := func(got, want float64) float64 { return max(got/want, want/got) - 1 }
		prefill, decode := 0., 0.
		for _, tokens := range []float64{500, 2000, w.maxPrompt / 4, w.maxPrompt} {
			for _, cached := range []float64{0, 0.5, 0.9} {
				seconds := func(m *step.Model) float64 {
					return m.Base + m.PrefillSeconds(cached*tokens, (1-cached)*tokens) + m.PromptToken*tokens
				}
				prefill = max(prefill, relative(seconds(&got), seconds(&want)))
			}
		}
		length := w.maxPrompt / math.Log(w.maxPrompt/100) // mean
		for _, n := range []float64{1, 4, 16} {
			for _, context := range []float64{length / 2, length, 2 * length} {
				decode = max(decode, relative(got.DecodeSeconds(n, n*context), want.DecodeSeconds(n, n*context)))
			}
		}
		all["prefill"], all["step"] = append(all["prefill"], prefill), append(all["step"], decode)
		fmt.Fprintf(&table, "%5.2f %7.2f %7.0f |", load, 1-nonStreaming, w.maxPrompt)
		busy := want.DecodeSeconds(8, 8*length)
		for _, p := range []struct {
			name      string
			got, want float64
			share     float64 // of a step's or a prefill's time
		}{
			{"base", got.Base, want.Base, want.Base / busy},
			{"rate", got.Rate, want.Rate, 1},
			{"attention", got.Attention, want.Attention, want.Attention * w.maxPrompt / 2},
			{"sequence", got.Sequence, want.Sequence, 8 * want.Sequence / busy},
			{"context", got.Context, want.Context, 8 * length * want.Context / busy},
			{"API server", got.PromptToken, want.PromptToken, want.PromptToken * want.Rate},
		} {
			if p.share < clearShare {
				fmt.Fprintf(&table, " (%.2f)", p.got/p.want)
				continue
			}
			all[p.name] = append(all[p.name], relative(p.got, p.want))
			fmt.Fprintf(&table, "  %.2f ", p.got/p.want)
		}
		fmt.Fprintf(&table, " | %.2f, %.2f\n", prefill, decode)
	}
	for _, limit := range limits {
		errors := all[limit.name]
		slices.Sort(errors)
		median, ninth := errors[len(errors)/2], errors[len(errors)*9/10]
		fmt.Fprintf(&table, "%s: %d values, median error %.3f, ninth decile %.3f, largest %.3f\n", limit.name, len(errors), median, ninth,
			errors[len(errors)-1])
		if median > limit.median || ninth > limit.ninth {
			t.Errorf("%s: median error %.3f, ninth decile %.3f", limit.name, median, ninth)
		}
	}
	t.Log(table.String())
}
