package router

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

func turnOf(req *Request, conversation uint64, turn prompt.Turn) *Request {
	req.PromptKey, req.Turn = conversation, turn
	return req
}

// TestTokensKeptForNextTurn has a cache of 10,000 tokens, of which 3,840 are in use, and a
// conversation of 4,800 that was just answered.
func TestTokensKeptForNextTurn(t *testing.T) {
	answered := func(t *testing.T, turn prompt.Turn) (*Router, []*backends.Backend, *clock) {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, PolledAt: c.now})
		sent(t, "", submit(r, turnOf(ask(fleet, 2, 60), 2, turn))).RecordFirstEvent()
		first := sent(t, "", submit(r, turnOf(ask(fleet, 1, 75), 1, turn)))
		first.RecordFirstEvent()
		c.advance(10 * time.Millisecond)
		first.Release(Outcome{End: Completed, OutputTokens: 20})
		return r, fleet, c
	}

	r, fleet, c := answered(t, prompt.TurnFirst)
	other := submit(r, ask(fleet, 3, 40)) // 2,560 tokens
	waits(t, "its tokens would evict the conversation", other)
	c.advance(10 * time.Millisecond)
	next := sent(t, "the next turn overtakes it", submit(r, turnOf(ask(fleet, 1, 80), 1, prompt.TurnLater)))
	if n := len(r.kept); n > 0 {
		t.Errorf("tokens of %d conversations are kept, want none while the next turn runs", n)
	}
	waits(t, "the conversation is running", other)
	next.RecordFirstEvent()
	next.Release(Outcome{End: Completed, OutputTokens: 20})
	waits(t, "the conversation was answered again", other)
	c.advance(time.Duration(keptPrefills * 80 * tokensPerBlock / testPrefillRate * float64(time.Second)))
	r.Tick()
	sent(t, "no turn followed in time", other)

	r, fleet, _ = answered(t, prompt.TurnFirst)
	r.RemoveBackend(fleet[0])
	if len(r.kept) > 0 {
		t.Error("tokens are kept on a backend that was removed")
	}

	r, fleet, _ = answered(t, prompt.TurnUnknown)
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
	older := submit(r, turnOf(ask(fleet, 4, blocksFor(1.5)), 1, prompt.TurnLater))
	waits(t, "the step is full", older)
	running.RecordFirstEvent()
	sent(t, "its conversation began 20 s before the other one, which is shorter", older)
	waits(t, "the step is full again", newer)
}

func TestKeptTokens(t *testing.T) {
	now := time.Unix(100, 0)
	k := keptTokens{}
	add := func(key uint64, slot, tokens, seconds int) {
		k.add(key, keptConversation{slot, tokens, now.Add(time.Duration(seconds) * time.Second)}, now)
	}
	check := func(name string, slot int, key uint64, want int) {
		t.Helper()
		if got := k.countForOthers(slot, key, now); got != want {
			t.Errorf("%s: %d tokens are kept for others, want %d", name, got, want)
		}
	}
	check("none yet", 1, 0, 0)
	add(1, 1, 100, 5)
	add(2, 1, 30, 10)
	add(3, 0, 7, 10)
	check("all but one's own", 1, 1, 30)
	check("of a conversation elsewhere", 1, 3, 130)
	add(1, 0, 50, 5)
	check("it has moved", 1, 0, 30)
	check("to here", 0, 0, 57)
	now = now.Add(6 * time.Second)
	check("its time is over", 0, 0, 7)
	delete(k, 3)
	check("sent", 0, 0, 0)
	for key := range uint64(maxKept) {
		add(10+key, 0, 1, 10)
	}
	check("no more than the bound, with the one on the other backend", 0, 0, maxKept-1)
}
