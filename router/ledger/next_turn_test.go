package ledger

import (
	"testing"
	"time"
)

func TestReservedTokens(t *testing.T) {
	now := time.Unix(100, 0)
	n := nextTurns{}
	reserve := func(key uint64, slot, tokens, seconds int) {
		n.reserve(key, reservedTokens{slot, tokens, now.Add(time.Duration(seconds) * time.Second)}, now)
	}
	check := func(name string, slot int, key uint64, want int) {
		t.Helper()
		if got := n.countForOthers(slot, key, now); got != want {
			t.Errorf("%s: %d tokens are reserved for others, want %d", name, got, want)
		}
	}
	check("none yet", 1, 0, 0)
	reserve(1, 1, 100, 5)
	reserve(2, 1, 30, 10)
	reserve(3, 0, 7, 10)
	check("all but one's own", 1, 1, 30)
	check("of a conversation elsewhere", 1, 3, 130)
	reserve(1, 0, 50, 5)
	check("it has moved", 1, 0, 30)
	check("to here", 0, 0, 57)
	now = now.Add(6 * time.Second)
	check("its time is over", 0, 0, 7)
	delete(n, 3)
	check("sent", 0, 0, 0)
	for key := range uint64(maxReservations) {
		reserve(10+key, 0, 1, 10)
	}
	check("no more than the bound, with the one on the other backend", 0, 0, maxReservations-1)
	reserve(10, 0, 5, 10)
	check("a known conversation at the bound", 0, 0, maxReservations-1+4)
	n.removeWhere(func(t reservedTokens) bool { return t.slot == 0 })
	check("the backend was removed", 0, 0, 0)
	check("on the other one", 1, 0, 30)
}
