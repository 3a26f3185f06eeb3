package replay

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/lab/policies"
	"warmroute/router"
	"warmroute/router/snapshot"
)

// proxyRestart is a restart of the proxy while no request is in flight.
type proxyRestart struct {
	restores bool // the router begins with what the one before knew
	cleared  int  // replicas that lose their caches meanwhile, the first ones
}

// restartProxy replaces the router of a run whose requests have ended.
func (r *run) restartProxy(t *testing.T, how proxyRestart) {
	t.Helper()
	now := func() time.Time { return wallTime(r.now) }
	blockBytes := int(float64(r.requests.BlockTokens) * r.bytesPerToken())
	newStore := func() *snapshot.Store {
		return snapshot.NewStore(r.router, snapshot.Options{BlockBytes: blockBytes, MaxBytes: indexBytes, Now: now,
			Log: slog.New(slog.DiscardHandler)})
	}
	var data bytes.Buffer
	before := newStore()
	for i, p := range r.fleet {
		p.backend.URL.Host = fmt.Sprintf("10.0.0.%d:8000", i)
		before.ObserveLoad(p.backend, p.reportedLoad(now(), r.reportedFactor))
	}
	if err := before.Write(&data); err != nil {
		t.Fatal(err)
	}
	for i := range how.cleared {
		if !r.fleet[i].ranks[0].engine.ResetPrefixCache() {
			t.Fatal("a request runs")
		}
	}
	var err error
	r.router, err = router.New(router.Options{
		Settings: router.Settings{Policy: r.Policy, Queue: r.Queue, PollInterval: r.pollEvery},
		Policies: policies.All(), Backends: r.all, BlockBytes: blockBytes, IndexMaxBytes: indexBytes, IndexMargin: 1,
		Now: now, Rand: rand.NewPCG(r.Seed, 2),
	})
	if err != nil {
		t.Fatal(err)
	}
	after := newStore()
	if how.restores {
		if err := after.ReadPending(&data); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range r.fleet {
		l := p.reportedLoad(now(), r.reportedFactor)
		p.backend.SetLoad(l)
		after.ObserveLoad(p.backend, l)
	}
}

// playAgain plays the requests of an open loop once more.
func (r *run) playAgain(t *testing.T) Summary {
	t.Helper()
	again := *r.requests
	again.Open = nil
	for _, j := range r.requests.Open {
		later := *j
		later.At += r.now
		again.Open = append(again.Open, &later)
	}
	r.requests, r.opened, r.ended, r.arrivals, r.measured = &again, 0, 0, 0, measures{timeline: newTimeline(r.Backends)}
	r.scheduleNextArrival()
	if err := r.processEvents(context.Background()); err != nil {
		t.Fatal(err)
	}
	return r.summary()
}

// A restored index is worth at least as much as none, also if all replicas or half of them have lost their caches meanwhile,
// whether responses have usage or only the counters tell.
func TestRestoredIndex(t *testing.T) {
	const seeds = 2
	play := func(how proxyRestart, noUsage bool) (ttft, hits float64) {
		for seed := range uint64(seeds) {
			s := &Scenario{
				Backends: 8, Engine: linear, Policy: "prefix", NoUsage: noUsage, Seed: seed, KVTokens: 200_000,
				Queue:    router.QueueSettings{Requests: 1 << 20, Bytes: 1 << 40, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour},
				Workload: SharedPrompts{Prompts: 300, PromptTokens: 8192, Zipf: 0.6, OwnTokens: 500, Output: 100, Rate: 9, For: 50 * time.Second},
			}
			r, _ := mustPlay(t, s)
			r.restartProxy(t, how)
			sum := r.playAgain(t)
			ttft += sum.TTFTMean / seeds
			hits += sum.HitRatio / seeds
		}
		return ttft, hits
	}
	for _, noUsage := range []bool{false, true} {
		for cleared, most := range map[int]float64{8: 1.1, 4: 1, 0: 0.8} { // of the TTFT without
			cold, coldHits := play(proxyRestart{cleared: cleared}, noUsage)
			restored, hits := play(proxyRestart{restores: true, cleared: cleared}, noUsage)
			t.Logf("%d replicas have lost their caches: mean TTFT %.3f s with a restored index (hit ratio %.3f), %.3f with none (%.3f)",
				cleared, restored, hits, cold, coldHits)
			if restored > most*cold {
				t.Errorf("%d replicas have lost their caches: mean TTFT %.3f s with a restored index, %.3f with none", cleared, restored, cold)
			}
		}
	}
}
