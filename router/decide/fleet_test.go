package decide

import (
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

const (
	blockBytes  = 256
	blockTokens = 64           // of newQuery
	prefillRate = 8000         // of newFleet
	testModel   = "test-38.5b" // whose prefill rate is guessed to be that
)

// testTime is when tests decide.
var testTime = time.Unix(1000, 0)

// newFleet returns a view of n idle backends under the policy prefix, with a queue.
func newFleet(t testing.TB, n int) (*Fleet, []*backends.Backend) {
	t.Helper()
	rule, err := policy.Registry{}.Lookup("prefix")
	if err != nil {
		t.Fatal(err)
	}
	estimates := estimate.New(blockBytes, 1.2)
	f := &Fleet{
		Now: testTime, Rule: rule, QueueEnabled: true, BlockBytes: blockBytes,
		Ledger: ledger.New(blockBytes, index.New(0, 1<<26), estimates, testTime), Estimates: estimates,
	}
	var all []*backends.Backend
	for slot := range n {
		b := &backends.Backend{Name: fmt.Sprint("b", slot), Slot: slot}
		f.Ledger.SetBackend(slot, b)
		estimates.SetModel(slot, testModel)
		f.Backends = append(f.Backends, Backend{
			Backend: b, Slot: slot, NameHash: uint64(slot), Weight: 1, PrefillRate: prefillRate, PrefillRateKnown: true,
			Availability: Availability{State: backends.Ready}, Figures: ledger.Figures{DecodeRate: ledger.DefaultDecodeRate},
		})
		all = append(all, b)
	}
	return f, all
}

// newQuery returns a streamed request of so many blocks, of which no backend holds any.
func newQuery(all []*backends.Backend, blocks int) *Query {
	req := &Request{Backends: all, Bytes: blocks * blockBytes, Sequences: 1, Streams: true}
	for i := range blocks {
		req.Blocks = append(req.Blocks, prompt.Block(i+1))
	}
	return &Query{Request: req, Sizes: estimate.TokenSizes{BytesPerToken: blockBytes / blockTokens}, Matched: make([]int, len(all))}
}

// learnTextLength makes certain which prompts are too long: those of six bytes for each token.
func learnTextLength(f *Fleet) {
	p := estimate.Prediction{Bytes: 400_000, IsText: true}
	f.Estimates.LearnFromCompletion(0, &p, estimate.Usage{PromptTokens: 100_000}, estimate.CacheInfo{Alignment: 1})
}

func TestIsAvailable(t *testing.T) {
	for _, tc := range []struct {
		name string
		a    Availability
		want bool
	}{
		{"ready", Availability{State: backends.Ready}, true},
		{"down", Availability{State: backends.Down}, false},
		{"draining", Availability{State: backends.Draining}, false},
		{"stopping", Availability{State: backends.Ready, Stopping: true}, false},
		{"asleep", Availability{State: backends.Ready, Asleep: true}, false},
	} {
		f, all := newFleet(t, 1)
		f.Backends[0].Availability = tc.a
		if tc.a.IsAvailable() != tc.want || f.IsAvailable(all[0]) != tc.want || f.HasAvailable() != tc.want {
			t.Errorf("%s: available %v, want %v", tc.name, tc.a.IsAvailable(), tc.want)
		}
		f.Backends[0].Backend = nil
		if f.IsAvailable(all[0]) || f.HasAvailable() {
			t.Errorf("%s: available, although it is not in the view", tc.name)
		}
	}
}

func TestFindBackend(t *testing.T) {
	f, all := newFleet(t, 2)
	if f.Find(all[1]) != &f.Backends[1] {
		t.Error("a backend of the fleet was not found")
	}
	for name, b := range map[string]*backends.Backend{"slot of another": {Name: "b1", Slot: 1}, "slot beyond the fleet": {Slot: 2}} {
		if f.Find(b) != nil {
			t.Errorf("%s: found", name)
		}
	}
}

func TestRoom(t *testing.T) {
	const (
		share = stepShare * defaultStepTokens
		inf   = -1 // any number of tokens
	)
	for _, tc := range []struct {
		name   string
		change func(f *Fleet, b *Backend)
		want   float64
	}{
		{"one is pending", func(*Fleet, *Backend) {}, share - 1000},
		{"not in the view", func(_ *Fleet, b *Backend) { b.Backend = nil }, 0},
		{"down", func(_ *Fleet, b *Backend) { b.State = backends.Down }, 0},
		{"at max_in_flight", func(_ *Fleet, b *Backend) { b.MaxInFlight = 1 }, 0},
		{"below max_in_flight", func(_ *Fleet, b *Backend) { b.MaxInFlight = 2 }, share - 1000},
		{"the last sequence is claimed", func(_ *Fleet, b *Backend) { b.MaxInFlight, b.Claimed.Sequences = 2, 1 }, 0},
		{"no queue", func(f *Fleet, _ *Backend) { f.QueueEnabled = false }, inf},
		{"no queue, at max_in_flight", func(f *Fleet, b *Backend) { f.QueueEnabled, b.MaxInFlight = false, 1 }, 0},
		{"idle", func(_ *Fleet, b *Backend) { b.KnownInFlight, b.NearlyFull, b.HasWaiting = 0, true, true }, inf},
		{"requests wait there, the cache is full", func(_ *Fleet, b *Backend) { b.NearlyFull, b.HasWaiting = true, true }, 0},
		{"requests wait there", func(_ *Fleet, b *Backend) { b.HasWaiting = true }, share - 1000},
		{"the cache is full", func(_ *Fleet, b *Backend) { b.NearlyFull = true }, share - 1000},
		{"maximum KV usage", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens = 1000, 1050 }, share - 1000},
		{"beyond maximum KV usage", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens = 1000, 1051 }, 0},
		{"with what is claimed of the cache", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens, b.Claimed.KV = 1000, 1000, 51 }, 0},
		{"none is pending", func(_ *Fleet, b *Backend) { b.Pending = 0 }, inf},
		{"none is pending, tokens are claimed", func(_ *Fleet, b *Backend) {
			b.Pending, b.QueuedTokens, b.Claimed.Uncached = 0, 0, 100
		}, share - 100},
		{"fewer are pending than there are engines", func(_ *Fleet, b *Backend) { b.Load = &backends.Load{Engines: 2} }, inf},
		{"as many as there are engines", func(_ *Fleet, b *Backend) { b.Load, b.Pending = &backends.Load{Engines: 2}, 2 }, 2*share - 1000},
		{"tokens of other clients", func(_ *Fleet, b *Backend) { b.ExternalTokens = 500 }, share - 1500},
		{"never below none", func(_ *Fleet, b *Backend) { b.ExternalTokens = 5000 }, 0},
		{"fast prefill", func(f *Fleet, _ *Backend) { f.Estimates.SetModel(0, "test-7.7b") }, queuedSeconds*40_000 - 1000},
		{"step as configured", func(f *Fleet, _ *Backend) { f.StepTokens = 5000 }, stepShare*5000 - 1000},
		{"unknown rate", func(_ *Fleet, b *Backend) { b.PrefillRateKnown = false }, inf},
		{"unknown rate, step as configured", func(f *Fleet, b *Backend) {
			f.StepTokens, b.PrefillRateKnown = 5000, false
		}, stepShare*5000 - 1000},
		{"the rule sends to idle backends only", func(f *Fleet, _ *Backend) { f.Rule.WaitsForIdle = true }, 0},
		{"the rule sends to idle backends, as this one", func(f *Fleet, b *Backend) { f.Rule.WaitsForIdle, b.Pending = true, 0 }, inf},
	} {
		f, _ := newFleet(t, 1)
		b := &f.Backends[0]
		b.KnownInFlight, b.Pending, b.QueuedTokens = 1, 1, 1000
		tc.change(f, b)
		want := tc.want
		if want == inf {
			want = math.Inf(1)
		}
		if f.UpdateRoom(b); b.Room != want {
			t.Errorf("%s: room for %v tokens, want %v", tc.name, b.Room, want)
		}
	}
}
