package decide

import (
	"fmt"
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
		Now: testTime, Policy: rule, QueueEnabled: true, BlockBytes: blockBytes,
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

// contextLengths returns the lengths of backends by their slots; 0: not known.
func contextLengths(t testing.TB, bySlot ...int) backends.ContextLengths {
	t.Helper()
	var all []*backends.Backend
	for slot, length := range bySlot {
		b := &backends.Backend{Name: fmt.Sprint("b", slot)}
		b.SetModels([]backends.Model{{ID: "m", MaxTokens: length}})
		all = append(all, b)
	}
	r, err := backends.NewRegistry(all)
	if err != nil {
		t.Fatal(err)
	}
	return r.Catalog().ContextLengths("m")
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
	for _, tc := range []struct {
		name   string
		change func(f *Fleet, b *Backend)
		want   bool
	}{
		{"one is pending", func(*Fleet, *Backend) {}, true},
		{"not in the view", func(_ *Fleet, b *Backend) { b.Backend = nil }, false},
		{"down", func(_ *Fleet, b *Backend) { b.State = backends.Down }, false},
		{"at max_in_flight", func(_ *Fleet, b *Backend) { b.MaxInFlight = 1 }, false},
		{"below max_in_flight", func(_ *Fleet, b *Backend) { b.MaxInFlight = 2 }, true},
		{"the last sequence is claimed", func(_ *Fleet, b *Backend) { b.MaxInFlight, b.Claimed.Sequences = 2, 1 }, false},
		{"no queue", func(f *Fleet, b *Backend) { f.QueueEnabled, b.Capacity, b.UsedKVTokens = false, 1000, 1001 }, true},
		{"no queue, at max_in_flight", func(f *Fleet, b *Backend) { f.QueueEnabled, b.MaxInFlight = false, 1 }, false},
		{"idle", func(_ *Fleet, b *Backend) { b.KnownInFlight, b.NearlyFull, b.HasWaiting = 0, true, true }, true},
		{"requests wait there, the cache is full", func(_ *Fleet, b *Backend) { b.NearlyFull, b.HasWaiting = true, true }, false},
		{"requests wait there", func(_ *Fleet, b *Backend) { b.HasWaiting = true }, true},
		{"the cache is nearly full", func(_ *Fleet, b *Backend) { b.NearlyFull = true }, true},
		{"maximum KV usage", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens = 1000, 1000 }, true},
		{"beyond maximum KV usage", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens = 1000, 1001 }, false},
		{"with what is claimed of the cache", func(_ *Fleet, b *Backend) { b.Capacity, b.UsedKVTokens, b.Claimed.KV = 1000, 900, 101 }, false},

		{"much is queued", func(_ *Fleet, b *Backend) { b.QueuedSeconds = 100 }, true},
		{"much is queued, shared", func(f *Fleet, b *Backend) { f.Shared, b.QueuedSeconds = true, maxSharedQueue+0.01 }, false},
		{"less is queued, shared", func(f *Fleet, b *Backend) { f.Shared, b.QueuedSeconds = true, maxSharedQueue }, true},
		{"by other clients too", func(f *Fleet, b *Backend) {
			f.Shared, b.QueuedSeconds, b.ExternalTokens = true, maxSharedQueue, b.PrefillRate
		}, false},
		{"fewer are pending than there are engines", func(f *Fleet, b *Backend) {
			f.Shared, b.QueuedSeconds, b.Load = true, 100, &backends.Load{Engines: 2}
		}, true},
		{"each engine has its share", func(f *Fleet, b *Backend) {
			f.Shared, b.QueuedSeconds, b.Pending, b.Load = true, 2*maxSharedQueue, 2, &backends.Load{Engines: 2}
		}, true},
		{"and more", func(f *Fleet, b *Backend) {
			f.Shared, b.QueuedSeconds, b.Pending, b.Load = true, 2*maxSharedQueue+0.01, 2, &backends.Load{Engines: 2}
		}, false},
		{"it runs as many as it can", func(f *Fleet, b *Backend) {
			f.Shared, b.SequenceLimit, b.KnownInFlight, b.Claimed.Sequences = true, 64, 70, 2
		}, false},
		{"one more may wait", func(f *Fleet, b *Backend) {
			f.Shared, b.SequenceLimit, b.KnownInFlight, b.Claimed.Sequences = true, 64, 70, 1
		}, true},
		{"unknown rate", func(f *Fleet, b *Backend) { f.Shared, b.QueuedSeconds, b.PrefillRateKnown = true, 100, false }, true},
		{"the policy sends to idle backends only", func(f *Fleet, _ *Backend) { f.Policy.WaitsForIdle = true }, false},
		{"the policy sends to idle backends, as this one", func(f *Fleet, b *Backend) { f.Policy.WaitsForIdle, b.Pending = true, 0 }, true},
	} {
		f, _ := newFleet(t, 1)
		b := &f.Backends[0]
		b.KnownInFlight, b.Pending, b.QueuedSeconds = 1, 1, 0.1
		tc.change(f, b)
		if f.UpdateRoom(b); b.HasRoom != tc.want {
			t.Errorf("%s: has room: %v, want %v", tc.name, b.HasRoom, tc.want)
		}
	}
}
