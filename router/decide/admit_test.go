package decide

import (
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// lastingConversations is a policy.ConversationTracker: another turn follows each.
type lastingConversations struct{}

func (lastingConversations) LaterTurnProbability() float64 { return 1 }

var _ policy.ConversationTracker = lastingConversations{}

// reserveForNextTurn reserves so many tokens of a backend for a prompt of a conversation that continues one with these blocks.
func reserveForNextTurn(f *Fleet, conversation queue.ConversationID, blocks []prompt.Block, tokens float64) {
	prediction := estimate.Prediction{PromptTokens: tokens, Uncached: 16, Sequences: 1}
	e := ledger.Entry{Conversation: conversation, Prediction: prediction}
	f.Ledger.Begin(&e, ledger.Prompt{Blocks: blocks, BytesPerToken: 4}, true, f.Now)
	f.Ledger.End(&e, &ledger.Outcome{End: ledger.Completed}, lastingConversations{}, f.Now)
}

func TestBlockedBy(t *testing.T) {
	const much = maxSharedQueue + 1
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
		{"little is queued", func(x fixture) { x.b.QueuedSeconds = maxSharedQueue }, NotBlocked},
		{"much is queued", func(x fixture) { x.b.QueuedSeconds = much }, BlockedByPrefill},
		{"much is queued, of one tenant", func(x fixture) { x.b.QueuedSeconds, x.Shared = much, false }, NotBlocked},
		{"without a queue", func(x fixture) { x.b.QueuedSeconds, x.QueueEnabled = much, false }, NotBlocked},
		{"no engine works on it", func(x fixture) { x.b.QueuedSeconds, x.NoEngine = much, true }, NotBlocked},
		{"the prompt is too long", func(x fixture) { x.b.QueuedSeconds, x.ContextLengths = much, contextLengths(t, 1) }, NotBlocked},
		{"a probe is due", func(x fixture) { x.b.QueuedSeconds, x.b.ProbeDue = much, true }, NotBlocked},
		{"much is queued by other clients alone", func(x fixture) {
			x.b.ExternalTokens, x.b.KnownInFlight, x.b.HasWaiting, x.b.NearlyFull = much*x.b.PrefillRate, 0, true, true
		}, NotBlocked},

		{"it runs as many as it can, and two wait", func(x fixture) { x.b.KnownInFlight, x.b.SequenceLimit = 10, 8 }, BlockedBySequences},
		{"one waits", func(x fixture) { x.b.KnownInFlight, x.b.SequenceLimit = 9, 8 }, NotBlocked},
		{"two wait, of one tenant", func(x fixture) { x.b.KnownInFlight, x.b.SequenceLimit, x.Shared = 10, 8, false }, NotBlocked},

		{"requests wait for room there", func(x fixture) { x.b.HasWaiting, x.b.NearlyFull = true, true }, BlockedByQueue},
		{"requests wait for the next step there", func(x fixture) { x.b.HasWaiting = true }, NotBlocked},
		{"a low-priority request, and requests wait there", func(x fixture) {
			x.b.HasWaiting, x.LimitsLowPriority, x.Priority = true, true, 1
		}, BlockedByQueue},
		{"a promoted low-priority request", func(x fixture) {
			x.b.HasWaiting, x.LimitsLowPriority, x.Priority, x.Promoted = true, true, 1, true
		}, NotBlocked},

		{"it fits into the cache", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = 1000, 1000-blockTokens }, NotBlocked},
		{"it does not", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = 1000, 1000-blockTokens+1 }, BlockedByKV},
		{"beside what is claimed", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens, x.b.Claimed.KV = 1000, 900, 100 }, BlockedByKV},
		{"other requests use its blocks", func(x fixture) {
			e := ledger.Entry{Prediction: estimate.Prediction{Sequences: 1, PromptTokens: blockTokens, Uncached: blockTokens}}
			x.Ledger.Begin(&e, ledger.Prompt{Blocks: x.Blocks, Bytes: blockBytes, BytesPerToken: 4}, true, x.Now)
			x.Matched[0], x.b.Capacity, x.b.UsedKVTokens = 1, 1000, 1000
		}, NotBlocked},
		{"its blocks are held, and in no use", func(x fixture) { x.Matched[0], x.b.Capacity, x.b.UsedKVTokens = 1, 1000, 1000 }, BlockedByKV},
		{"it never fits", func(x fixture) { x.b.Capacity, x.b.UsedKVTokens = blockTokens-1, 50 }, NotBlocked},

		{"tokens of another conversation are reserved", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, []prompt.Block{70}, 500)
			x.b.Capacity, x.b.UsedKVTokens = 1000, 600
		}, BlockedByNextTurns},
		{"and it does not fit without them", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, []prompt.Block{70}, 500)
			x.b.Capacity, x.b.UsedKVTokens = 1000, 1000
		}, BlockedByKV},
		{"tokens are reserved for the turn that it is", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, x.Blocks, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Conversation, x.Turn = 1000, 600, 7, prompt.TurnLater
		}, NotBlocked},
		{"of its conversation, which it does not continue", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, []prompt.Block{70}, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Conversation, x.Turn = 1000, 600, 7, prompt.TurnLater
		}, BlockedByNextTurns},
		{"of a conversation of the same name of another tenant", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Tenant: 2, Key: 7}, x.Blocks, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Conversation, x.Turn = 1000, 600, 7, prompt.TurnLater
		}, BlockedByNextTurns},
		{"of a tenant that has used more of its share", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Tenant: 2, Key: 7}, []prompt.Block{70}, 500)
			x.IsDueBefore = func(_ queue.Class, tenant, other uint64, _ time.Time) bool { return tenant != 2 || other != 0 }
			x.b.Capacity, x.b.UsedKVTokens = 1000, 600
		}, NotBlocked},
		{"of a tenant, and another one has used more", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Tenant: 2, Key: 7}, []prompt.Block{70}, 500)
			x.IsDueBefore = func(_ queue.Class, tenant, other uint64, _ time.Time) bool { return tenant == 2 && other == 0 }
			x.b.Capacity, x.b.UsedKVTokens = 1000, 600
		}, BlockedByNextTurns},
		{"it is promoted", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, []prompt.Block{70}, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Promoted = 1000, 600, true
		}, NotBlocked},
		{"the time for the next turn is over", func(x fixture) {
			reserveForNextTurn(x.Fleet, queue.ConversationID{Key: 7}, []prompt.Block{70}, 500)
			x.b.Capacity, x.b.UsedKVTokens, x.Now = 1000, 600, x.Now.Add(time.Second)
		}, NotBlocked},
	} {
		f, all := newFleet(t, 1)
		learnTextLength(f)
		q, b := newQuery(all, 1), &f.Backends[0]
		f.Shared, b.KnownInFlight, b.Pending = true, 1, 1
		tc.change(fixture{f, q, b})
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := f.BlockedBy(q, f.choice(&c, 0)); got != tc.want {
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

func TestClaim(t *testing.T) {
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
	if b.Claimed != (Claim{KV: 10 * blockTokens}) || !b.HasRoom {
		t.Errorf("claimed %+v, has room: %v", b.Claimed, b.HasRoom)
	}
	f.Claim(q, 0)
	if b.Claimed.KV != 20*blockTokens || b.HasRoom {
		t.Errorf("claimed %+v of a cache that has 1,000 tokens free, has room: %v", b.Claimed, b.HasRoom)
	}
	f.Claim(q, 0)
	if b.Claimed.KV != 20*blockTokens || b.HasRoom {
		t.Errorf("without room: claimed %+v, has room: %v", b.Claimed, b.HasRoom)
	}
	if other := &f.Backends[1]; other.Claimed != (Claim{}) || !other.HasRoom {
		t.Errorf("of another one: claimed %+v, has room: %v", other.Claimed, other.HasRoom)
	}
}

func TestClaimSequences(t *testing.T) {
	f, all := newFleet(t, 4)
	for slot, inFlight := range []int64{7, 6, 5, 1} {
		b := &f.Backends[slot]
		b.MaxInFlight, b.KnownInFlight = 8, inFlight
		if f.UpdateRoom(b); !b.HasRoom {
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
		if b.Claimed.Sequences != 4 || b.HasRoom {
			t.Errorf("%s: %d sequences of b%d are claimed, has room: %v; want 4, false", name, b.Claimed.Sequences, wantSlot, b.HasRoom)
		}
	}
	claim("the one with most free", 2)
	claim("then that with most free beside the claim", 1)
	claim("then the next", 0)
	if b := &f.Backends[3]; b.Claimed.Sequences != 0 || !b.HasRoom {
		t.Error("a backend that does not serve the model was claimed")
	}
}
