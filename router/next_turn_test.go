package router

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/queue"
)

// reserved returns how many tokens of a backend's cache are reserved for next turns.
func reserved(r *Router, slot int, now time.Time) int {
	return r.fleet.ledger.CountReservedForOthers(slot, queue.ConversationID{}, nil, nil, now)
}

func turnOf(req *Request, conversation uint64, turn prompt.TurnKind) *Request {
	req.PromptKey, req.Turn = conversation, turn
	return req
}

// TestTokensReservedForNextTurn has a cache of 10,000 tokens, of which 3,840 are in use, and a
// conversation of 4,800 whose turn has just ended.
func TestTokensReservedForNextTurn(t *testing.T) {
	turnEnded := func(t *testing.T, turn prompt.TurnKind) (*Router, []*backends.Backend, *clock) {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, PolledAt: c.now})
		sent(t, "", submit(r, turnOf(ask(fleet, 2, 60), 2, turn))).RecordFirstEvent()
		first := sent(t, "", submit(r, turnOf(ask(fleet, 1, 75), 1, turn)))
		first.RecordFirstEvent()
		c.advance(10 * time.Millisecond)
		first.Release(Outcome{End: Completed, OutputTokens: 20})
		return r, fleet, c
	}

	r, fleet, c := turnEnded(t, prompt.TurnFirst)
	other := submit(r, ask(fleet, 3, 40)) // 2,560 tokens
	waits(t, "its tokens would evict the conversation", other)
	c.advance(10 * time.Millisecond)
	next := sent(t, "the next turn overtakes it", submit(r, turnOf(ask(fleet, 1, 80), 1, prompt.TurnLater)))
	if n := reserved(r, 0, c.now); n > 0 {
		t.Errorf("%d tokens are reserved, want none while the next turn runs", n)
	}
	waits(t, "the conversation is running", other)
	next.RecordFirstEvent()
	next.Release(Outcome{End: Completed, OutputTokens: 20})
	waits(t, "another turn of the conversation has ended", other)
	c.advance(time.Duration(reservedPrefills * 80 * tokensPerBlock / testPrefillRate * float64(time.Second)))
	r.Tick()
	sent(t, "no turn followed in time", other)

	r, fleet, c = turnEnded(t, prompt.TurnFirst)
	if n := reserved(r, 0, c.now); n != 4820 {
		t.Errorf("%d tokens are reserved, want those of the prompt and of the output", n)
	}
	r.RemoveBackend(fleet[0])
	if n := reserved(r, 0, c.now); n > 0 {
		t.Errorf("%d tokens are reserved on a backend that was removed", n)
	}

	r, fleet, _ = turnEnded(t, prompt.TurnUnknown)
	sent(t, "the turn is unknown", submit(r, ask(fleet, 3, 40)))
}

func TestQueuedTurnsOfOlderConversationFirst(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	sent(t, "", submit(r, turnOf(ask(fleet, 1, 1), 1, prompt.TurnFirst))).Release(Outcome{End: Completed})
	c.advance(20 * time.Second)
	running := sent(t, "", submit(r, ask(fleet, 2, blocksFor(2))))
	newer := submit(r, turnOf(ask(fleet, 3, blocksFor(1)), 3, prompt.TurnFirst))
	waits(t, "the step is full", newer)
	c.advance(time.Millisecond)
	older := submit(r, turnOf(ask(fleet, 1, blocksFor(1.5)), 1, prompt.TurnLater))
	waits(t, "the step is full", older)
	running.RecordFirstEvent()
	sent(t, "its conversation began 20 s before the other one, which is shorter", older)
	waits(t, "the step is full again", newer)
}
