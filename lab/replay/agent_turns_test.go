package replay

import (
	"slices"
	"testing"
	"time"

	"warmroute/prompt"
)

func TestAgentTurns(t *testing.T) {
	r := mustMake(t, AgentTurns{Sessions: 6000, BeginWithin: time.Hour, Agents: 1}, 8)
	if len(r.Open) != 6000 || r.Sessions != 6000 || r.Open[5999].At >= time.Hour {
		t.Fatalf("%d of %d sessions begin by themselves, the last at %v", len(r.Open), r.Sessions, r.Open[len(r.Open)-1].At)
	}
	var tools, pauses []float64
	turns, calls := 0.0, 0.0
	last := map[uint64]*Job{}
	for j := range r.all() {
		s := j.session.(*turnsSession)
		c := s.calls[s.done-1]
		calls++
		before := last[j.Conversation]
		if c.isFirstOfTurn {
			turns++
		}
		switch {
		case before == nil:
			if j.Turn != prompt.TurnFirst {
				t.Fatal("the first call of a session is not a first turn")
			}
		case !slices.Equal(j.Blocks[:len(before.Blocks)+len(before.Reply)], slices.Concat(before.Blocks, before.Reply)):
			t.Fatal("a call does not begin with the one before it and its output")
		case c.isFirstOfTurn:
			pauses = append(pauses, c.pause.Seconds())
		default:
			tools = append(tools, c.pause.Seconds())
		}
		last[j.Conversation] = j
	}
	if int(calls) != r.Total {
		t.Errorf("%v calls, announced were %d", calls, r.Total)
	}
	near(t, "calls a turn", calls/turns, 7.8, 0.04)
	near(t, "turns a session", turns/6000, turnsMeanTurns, 0.05)
	near(t, "median time of a tool", median(tools), 0.3, 0.05)
	near(t, "median pause of a person", median(pauses), 84, 0.07)
}

func TestAlternatingAgents(t *testing.T) {
	const agents = 4
	r := mustMake(t, AgentTurns{Sessions: 300, BeginWithin: time.Minute, Agents: agents}, 8)
	type agentOf struct {
		conversation uint64
		agent        int
	}
	last := map[agentOf]*Job{}
	previous := map[uint64]agentCall{}
	systems := map[uint64]bool{}
	n := 0
	for j := range r.all() {
		n++
		s := j.session.(*turnsSession)
		c := s.calls[s.done-1]
		if before, ok := previous[j.Conversation]; ok && !c.isFirstOfTurn && (c.agent == 0) == (before.agent == 0) {
			t.Fatalf("agent %d follows agent %d", c.agent, before.agent)
		}
		previous[j.Conversation] = c
		systems[uint64(j.Blocks[turnsMinSystem-1])] = true
		key := agentOf{j.Conversation, c.agent}
		before := last[key]
		if first := before == nil; first != (j.Turn == prompt.TurnFirst) {
			t.Fatalf("the first call of an agent: %v, turn kind %v", first, j.Turn)
		}
		if before != nil && !slices.Equal(j.Blocks[:len(before.Blocks)], before.Blocks) {
			t.Fatal("an agent's call does not begin with its call before")
		}
		last[key] = j
	}
	if n != r.Total || len(systems) != turnsApps*agents {
		t.Errorf("%d calls of %d, %d system prompts, want %d", n, r.Total, len(systems), turnsApps*agents)
	}
}

func TestNewArrivalsLoseNothing(t *testing.T) {
	for name, w := range map[string]Workload{
		"bursts":             Clients{Clients: 20, PromptTokens: 2000, OwnTokens: 1000, Output: 100, Rate: 1, For: 5 * clientsWindow / 10},
		"turns of agents":    AgentTurns{Sessions: 12, BeginWithin: time.Minute, Agents: 1},
		"alternating agents": AgentTurns{Sessions: 12, BeginWithin: time.Minute, Agents: 4},
	} {
		s := Scenario{Policy: ownRule, Queue: worldQueue(), Workload: w, Backends: 3, KVTokens: 400_000, Seed: 1}
		result, err := s.Run(t.Context())
		if err != nil {
			t.Fatal(name, err)
		}
		want := mustMake(t, w, 3).Total
		if result.Lost > 0 || result.Requests != want {
			t.Errorf("%s: %d of %d requests were served, %d lost", name, result.Requests, want, result.Lost)
		}
	}
}
