package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router"
)

// idlingAgents are conversations of a few turns, one after another, and then none for 20 minutes, again and again.
type idlingAgents struct{ conversations int }

func (w idlingAgents) Requests(_ int, seed uint64) (*Requests, error) {
	const (
		idle, pause = 20 * time.Minute, 15 * time.Second // means
		bursts      = 4
		headBlocks  = 12 // that a twentieth of all conversations share
		groups      = 20
	)
	r := &Requests{BlockTokens: generatedBlockTokens}
	all := make([]*agenticSession, w.conversations)
	for i := range all {
		draw := rand.New(rand.NewPCG(seed, uint64(i)))
		s := &agenticSession{number: i, head: sessionHead{grouped: headBlocks, group: i % groups, groups: groups}}
		size := headBlocks*generatedBlockTokens + roundTokens(30_000*drawLognormal(draw, 0, 0.6), 150_000)
		before := time.Duration(0)
		for range bursts {
			for range 1 + draw.IntN(11) {
				output := roundTokens(250*drawLognormal(draw, 0, 0.7), maxAgenticOutput)
				s.turns = append(s.turns, agenticStep{before, size, output})
				size = min(size+output+roundTokens(600*drawLognormal(draw, 0, 0.8), maxAgenticTurn), maxAgenticContext)
				before = drawInterval(draw, 1/pause.Seconds())
			}
			before = time.Duration((0.5 + draw.Float64()) * float64(idle))
		}
		all[i] = s
		r.Total += len(s.turns)
	}
	playSessions(r, all, len(all), idle/time.Duration(len(all)))
	return r, nil
}

// Agents that idle for 20 minutes find their contexts in a second cache, which holds eight times as much as the GPU's. The
// router learns how long it takes to fetch a token from there. Where that is as long as to compute it, another replica is
// often the better one.
func TestFetchTimeIsLearned(t *testing.T) {
	const kvTokens, backends = 400_000, 4
	for _, c := range []struct {
		tokensPerSecond float64
		noUsage         bool
		maxE2E          float64 // over that of a router that takes each hit for free
	}{
		{200_000, true, 1.01}, // host memory
		{15_000, false, 0.97}, // a disk, or a store in the network
		{6_000, false, 0.85},
	} {
		t.Run(fmt.Sprintf("%g tokens a second, no usage %v", c.tokensPerSecond, c.noUsage), func(t *testing.T) {
			play := func(hostHitsUnknown bool) (*run, Summary) {
				return mustPlay(t, &Scenario{
					Backends: backends, KVTokens: kvTokens, Policy: "prefix", Workload: idlingAgents{160}, Seed: 1, NoUsage: c.noUsage,
					Engine: engine.Config{HostKVTokens: 8 * kvTokens, HostLoadRate: c.tokensPerSecond}, HostHitsUnknown: hostHitsUnknown,
					Queue: router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour},
				})
			}
			_, free := play(true)
			r, sum := play(false)
			t.Logf("mean TTFT %.3f s, E2E %.3f s, %.3f hit; free hits: TTFT %.3f s, E2E %.3f s, %.3f hit",
				sum.TTFTMean, sum.E2EMean, sum.HitRatio, free.TTFTMean, free.E2EMean, free.HitRatio)
			if sum.E2EMean > c.maxE2E*free.E2EMean {
				t.Errorf("mean E2E %.3f s, %.3f s where each hit is free, want at most %.2f of that", sum.E2EMean, free.E2EMean, c.maxE2E)
			}
			for i, e := range r.router.Estimates() {
				learned, want := 1/e.FetchSeconds, max(c.tokensPerSecond, e.PrefillRate/4) // which is the bound
				t.Logf("b%d: %.0f tokens a second", i, learned)
				if math.Abs(learned/want-1) > 0.2 {
					t.Errorf("b%d: %.0f tokens a second were learned, want %.0f", i, learned, want)
				}
			}
		})
	}
}

// TestSharedStoreIsLearned has agents that idle on replicas that share a store, whose tokens take a tenth of their prefill
// to fetch: each replica finds what the others have computed, and the router sends turns to where there is the least work.
func TestSharedStoreIsLearned(t *testing.T) {
	const kvTokens, rate = 400_000, 100_000
	a100 := publishedHardware()[2].times
	a100.HostKVTokens, a100.HostLoadRate = 8*kvTokens, rate
	play := func(hostHitsUnknown bool) (*run, Summary) {
		return mustPlay(t, &Scenario{
			Backends: 4, KVTokens: kvTokens, Policy: "prefix", Workload: idlingAgents{160}, Seed: 1, Engine: a100,
			Queue:      router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour},
			SharedHost: true, HostHitsUnknown: hostHitsUnknown,
		})
	}
	_, free := play(true)
	r, sum := play(false)
	t.Logf("mean TTFT %.3f s, E2E %.3f s, %.3f hit; each hit free, and only where it was computed: TTFT %.3f s, E2E %.3f s, %.3f hit",
		sum.TTFTMean, sum.E2EMean, sum.HitRatio, free.TTFTMean, free.E2EMean, free.HitRatio)
	if sum.E2EMean > 0.97*free.E2EMean || sum.PredictionError > 0.02 {
		t.Errorf("mean E2E %.3f s, want at most 0.97 of %.3f s; %.3f of the tokens wrongly predicted",
			sum.E2EMean, free.E2EMean, sum.PredictionError)
	}
	for i, e := range r.router.Estimates() {
		if learned := 1 / e.FetchSeconds; math.Abs(learned/rate-1) > 0.2 {
			t.Errorf("b%d: %.0f tokens a second were learned, want %d", i, learned, rate)
		}
	}
}
