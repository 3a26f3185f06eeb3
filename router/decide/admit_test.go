package decide

import (
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

// lastingConversations is a policy.ConversationTracker: another turn follows each.
type lastingConversations struct{}

func (lastingConversations) ConversationAge(uint64, time.Time) time.Duration { return 0 }
func (lastingConversations) LaterTurnProbability() float64                   { return 1 }

var _ policy.ConversationTracker = lastingConversations{}

// reserveForNextTurn reserves so many tokens of a backend for the next turn of a conversation.
func reserveForNextTurn(f *Fleet, slot int, conversation uint64, tokens float64) {
	prediction := estimate.Prediction{PromptTokens: tokens, Uncached: 16, Sequences: 1}
	e := ledger.Entry{Slot: slot, Conversation: conversation, Prediction: prediction}
	f.Ledger.Begin(&e, ledger.Prompt{BytesPerToken: 4}, true, f.Now)
	f.Ledger.End(&e, &ledger.Outcome{End: ledger.Completed}, lastingConversations{}, f.Now)
}

func TestBlockedBy(t *testing.T) {
	const share = stepShare * defaultStepTokens
	type fixture struct {
		*Fleet
		*Query
		b *Backend
	}
	for _, tc := range []struct {
		name   string
		change func(x fixture)
		want   Blocker
	}{
		{"the next step has room", func(x fixture) { x.b.QueuedTokens = share - blockTokens }, NotBlocked},
		{"the next step is full", func(x fixture) { x.b.QueuedTokens = share - blockTokens + 1 }, BlockedByStep},
		{"with what other clients queue", func(x fixture) { x.b.QueuedTokens, x.b.ExternalTokens = 1500, share-1500 }, BlockedByStep},
		{"with what is claimed", func(x fixture) { x.b.Claimed.Uncached = share }, BlockedByStep},
		{"full, but the prompt is held", func(x fixture) {
			x.Matched[0], x.b.QueuedTokens = 1, share-estimate.MinUncachedTokens
		}, NotBlocked},

		{"full, without a queue", func(x fixture) { x.b.QueuedTokens, x.QueueEnabled = share, false }, NotBlocked},
		{"full, no engine works on it", func(x fixture) { x.b.QueuedTokens, x.NoEngine = share, true }, NotBlocked},
		{"full, the prompt is too long", func(x fixture) { x.b.QueuedTokens, x.MaxPromptTokens = share, 1 }, NotBlocked},
		{"full, a probe is due", func(x fixture) { x.b.QueuedTokens, x.b.ProbeDue = share, true }, NotBlocked},
		{"full, by other clients alone", func(x fixture) {
			x.b.ExternalTokens, x.b.KnownInFlight, x.b.HasWaiting, x.b.NearlyFull = share, 0, true, true
		}, NotBlocked},

		{"requests wait for room there", func(x fixture) { x.b.HasWaiting, x.b.NearlyFull = true, true }, BlockedByQueue},
		{"requests wait for the next step there", func(x fixture) { x.b.HasWaiting = true }, NotBlocked},
		{"a batch request, and requests wait there", func(x fixture) {
			x.b.HasWaiting, x.LimitsBatch, x.Priority = true, true, 1
		}, BlockedByQueue},
		{"a promoted batch request", func(x fixture) {
			x.b.HasWaiting, x.LimitsBatch, x.Priority, x.Promoted = true, true, 1, true
		}, NotBlocked},

		{"it fits into the cache", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = 1000, 1050-blockTokens }, NotBlocked},
		{"it does not", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = 1000, 1050-blockTokens+1 }, BlockedByKV},
		{"beside what is claimed", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens, x.b.Claimed.KV = 1000, 900, 100 }, BlockedByKV},
		{"other requests use its blocks", func(x fixture) {
			e := ledger.Entry{Prediction: estimate.Prediction{Sequences: 1, PromptTokens: blockTokens, Uncached: blockTokens}}
			x.Ledger.Begin(&e, ledger.Prompt{Blocks: x.Blocks, Bytes: blockBytes, BytesPerToken: 4}, true, x.Now)
			x.Matched[0], x.b.Capacity, x.b.UsedKVTokens = 1, 1000, 1050
		}, NotBlocked},
		{"its blocks are held, and in no use", func(x fixture) { x.Matched[0], x.b.Capacity, x.b.UsedKVTokens = 1, 1000, 1050 }, BlockedByKV},
		{"it never fits", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = blockTokens-1, 50 }, NotBlocked},

		{"tokens of another conversation are reserved", func(x fixture) {
			reserveForNextTurn(x.Fleet, 0, 7, 500)
			x.b.Capacity, x.b.UsedKVTokens = 1000, 600
		}, BlockedByNextTurns},
		{"and it does not fit without them", func(x fixture) {
			reserveForNextTurn(x.Fleet, 0, 7, 500)
			x.b.Capacity, x.b.UsedKVTokens = 1000, 1000
		}, BlockedByKV},
		{"tokens of its own conversation are reserved", func(x fixture) {
			reserveForNextTurn(x.Fleet, 0, 7, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Session, x.Turn = 1000, 600, 7, prompt.TurnLater
		}, NotBlocked},
		{"it is promoted", func(x fixture) {
			reserveForNextTurn(x.Fleet, 0, 7, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Promoted = 1000, 600, true
		}, NotBlocked},
		{"the time for the next turn is over", func(x fixture) {
			reserveForNextTurn(x.Fleet, 0, 7, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Now = 1000, 600, x.Now.Add(time.Second)
		}, NotBlocked},
	} {
		f, all := newFleet(t, 1)
		learnTextLength(f)
		q, b := newQuery(all, 1), &f.Backends[0]
		b.KnownInFlight, b.Pending = 1, 1
		tc.change(fixture{f, q, b})
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		choice, _ := f.ChooseSlot(&c, 0)
		if got := f.BlockedBy(q, choice); got != tc.want {
			t.Errorf("%s: blocked by %d (%s), want %d (%s)", tc.name, got, got, tc.want, tc.want)
		}
	}
}

// A blocker is explained, and no two of them alike.
func TestBlockerString(t *testing.T) {
	seen := map[string]Blocker{}
	for b := NotBlocked; b <= BlockedByNextTurns; b++ {
		s := b.String()
		if other, known := seen[s]; known || (s == "") != (b == NotBlocked) {
			t.Errorf("%d is explained as %q, like %d", b, s, other)
		}
		seen[s] = b
	}
}

func TestFitsNextStepAnywhere(t *testing.T) {
	f, all := newFleet(t, 3)
	for slot, room := range []float64{0, 2 * blockTokens, 100 * blockTokens} {
		f.Backends[slot].Room = room
	}
	for _, tc := range []struct {
		name    string
		blocks  int
		matched int // on the second one
		want    bool
	}{
		{"as much as one has room for", 2, 0, true},
		{"more than one that serves the model has room for", 3, 0, false},
		{"without what it holds", 3, 1, true},
	} {
		q := newQuery(all[:2], tc.blocks)
		q.Matched[1] = tc.matched
		if got := f.FitsNextStepAnywhere(q); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestClaim(t *testing.T) {
	const share = stepShare * defaultStepTokens
	f, all := newFleet(t, 2)
	for i := range f.Backends {
		b := &f.Backends[i]
		b.KnownInFlight, b.Pending, b.Capacity, b.UsedKVTokens = 1, 1, 2000, 1000
		f.UpdateRoom(b)
	}
	q := newQuery(all, 10)
	q.Matched[0] = 4 // which no request uses
	b := &f.Backends[0]
	f.Claim(q, 0)
	prefill := f.Estimates.Step(0).PrefillSeconds(4*blockTokens, 6*blockTokens)
	if b.Claimed != (Claim{Uncached: 6 * blockTokens, KV: 10 * blockTokens, Prefill: prefill}) || b.Room != share-6*blockTokens {
		t.Errorf("claimed %+v, room for %v", b.Claimed, b.Room)
	}
	f.Claim(q, 0)
	if b.Claimed.KV != 20*blockTokens || b.Room != 0 {
		t.Errorf("claimed %+v of a cache that has 1,100 tokens free, room for %v", b.Claimed, b.Room)
	}
	f.Claim(q, 0)
	if b.Claimed.Uncached != 18*blockTokens || b.Claimed.KV != 20*blockTokens || b.Room != 0 {
		t.Errorf("without room: claimed %+v, room for %v", b.Claimed, b.Room)
	}
	if other := &f.Backends[1]; other.Claimed != (Claim{}) || other.Room != share {
		t.Errorf("of another one: claimed %+v, room for %v", other.Claimed, other.Room)
	}
}

func TestClaimSequences(t *testing.T) {
	f, all := newFleet(t, 4)
	for slot, inFlight := range []int64{7, 6, 5, 1} {
		b := &f.Backends[slot]
		b.MaxInFlight, b.KnownInFlight = 8, inFlight
		if f.UpdateRoom(b); b.Room == 0 {
			t.Fatalf("b%d has no room for a request with one sequence", slot)
		}
	}
	q := newQuery(all[:3], 1)
	q.Sequences = 4
	claim := func(name string, wantSlot int) {
		t.Helper()
		var c Candidates
		if err := f.Filter(q, &c); err != ErrMaxInFlight {
			t.Fatalf("%s: %v", name, err)
		}
		f.ClaimSequences(q, &c)
		b := &f.Backends[wantSlot]
		if b.Claimed.Sequences != 4 || b.Room != 0 {
			t.Errorf("%s: %d sequences of b%d are claimed, room for %v tokens; want 4, 0", name, b.Claimed.Sequences, wantSlot, b.Room)
		}
	}
	claim("the one with most free", 2)
	claim("then that with most free beside the claim", 1)
	claim("then the next", 0)
	if b := &f.Backends[3]; b.Claimed.Sequences != 0 || b.Room == 0 {
		t.Error("a backend that does not serve the model was claimed")
	}
}
