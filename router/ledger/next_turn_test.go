package ledger

import (
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/router/queue"
)

func TestReservedTokens(t *testing.T) {
	now := time.Unix(100, 0)
	n := nextTurns{}
	id := func(key uint64) queue.ConversationID { return queue.ConversationID{Key: key} }
	blocks := func(key uint64) []prompt.Block { return []prompt.Block{1, prompt.Block(key)} }
	reserve := func(key uint64, slot, tokens, seconds int) {
		n.reserve(id(key), reservedTokens{slot, tokens, now.Add(time.Duration(seconds) * time.Second), prompt.HeadOf(blocks(key))}, now)
	}
	check := func(name string, slot int, key uint64, want int) {
		t.Helper()
		if got := n.countForOthers(slot, id(key), blocks(key), nil, now); got != want {
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
	n.removeContinued(id(3), blocks(4))
	check("another prompt of it was sent", 0, 0, 7)
	n.removeContinued(id(3), blocks(3))
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

// TestReservedTokensOfTenants has two tenants with a conversation of the same name.
func TestReservedTokensOfTenants(t *testing.T) {
	now := time.Unix(100, 0)
	n := nextTurns{}
	turn := []prompt.Block{1, 2}
	for tenant, tokens := range map[uint64]int{1: 100, 2: 30} {
		n.reserve(queue.ConversationID{Tenant: tenant, Key: 7}, reservedTokens{0, tokens, now, prompt.HeadOf(turn)}, now)
	}
	for _, c := range []struct {
		name      string
		tenant    uint64
		blocks    []prompt.Block
		holdsBack bool
		want      int
	}{
		{"the next turn", 1, turn, true, 30},
		{"the next turn, of a tenant that is due", 1, turn, false, 0},
		{"another prompt of the conversation", 1, turn[:1], true, 130},
		{"of a tenant that is due", 1, turn[:1], false, 100},
		{"a third tenant", 3, turn, true, 130},
		{"that is due", 3, turn, false, 0},
	} {
		holdsBack := func(tenant uint64) bool {
			if tenant == c.tenant {
				t.Errorf("%s: asked whether a tenant holds back itself", c.name)
			}
			return c.holdsBack
		}
		if got := n.countForOthers(0, queue.ConversationID{Tenant: c.tenant, Key: 7}, c.blocks, holdsBack, now); got != c.want {
			t.Errorf("%s: %d tokens are reserved for others, want %d", c.name, got, c.want)
		}
	}
}
