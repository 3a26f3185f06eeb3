package loadgen

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"
)

func testChats() *Chats {
	return &Chats{
		Seed: 1, Sessions: 12, Concurrency: 3,
		SystemPrompts: 4, SystemTokens: 100, Zipf: 1,
		Turns: Range{2, 5}, UserTokens: Range{10, 20}, OutputTokens: Range{5, 9},
		Think: time.Second,
	}
}

// turns plays a session to its end, with its number as the output of each turn.
func turns(s *Session) (all []Turn) {
	output := ""
	for {
		turn, ok := s.Next(output)
		if !ok {
			return all
		}
		turn.Messages = slices.Clone(turn.Messages)
		all = append(all, turn)
		output = fmt.Sprint("output ", len(all))
	}
}

func TestSessionIsDeterministic(t *testing.T) {
	a := testChats()
	inOrder := [][]Turn{turns(a.NewSession(0)), turns(a.NewSession(1)), turns(a.NewSession(2))}
	b := testChats()
	backwards := [][]Turn{2: turns(b.NewSession(2)), 1: turns(b.NewSession(1)), 0: turns(b.NewSession(0))}
	if !reflect.DeepEqual(inOrder, backwards) {
		t.Error("the order of play changed a session")
	}
	b.Seed = 2
	if reflect.DeepEqual(inOrder[0], turns(b.NewSession(0))) {
		t.Error("the seed changed nothing")
	}
}

func TestSessionResendsConversation(t *testing.T) {
	c := testChats()
	for i := range 12 {
		all := turns(c.NewSession(i))
		if len(all) < 2 || len(all) > 5 {
			t.Errorf("session %d has %d turns, want 2 to 5", i, len(all))
		}
		for k, turn := range all {
			m := turn.Messages
			if len(m) != 2+2*k || m[0].Role != "system" || len(m[0].Content) != 400 {
				t.Fatalf("turn %d has messages %.200v", k, m)
			}
			if user := m[len(m)-1]; user.Role != "user" || len(user.Content) < 40 || len(user.Content) > 80 {
				t.Errorf("turn %d ends with %v", k, user)
			}
			if turn.OutputTokens < 5 || turn.OutputTokens > 9 {
				t.Errorf("turn %d asks for %d tokens", k, turn.OutputTokens)
			}
			if k == 0 {
				continue
			}
			if !reflect.DeepEqual(m[:len(m)-2], all[k-1].Messages) {
				t.Errorf("turn %d does not begin with turn %d", k, k-1)
			}
			if got, want := m[len(m)-2], (Message{"assistant", fmt.Sprint("output ", k)}); got != want {
				t.Errorf("turn %d has output %v, want %v", k, got, want)
			}
		}
	}
}

func TestSystemPromptsZipf(t *testing.T) {
	c := testChats()
	count := map[string]int{}
	for i := range 2000 {
		turn, _ := c.NewSession(i).Next("")
		count[turn.Messages[0].Content]++
	}
	var got []int
	for k := range c.SystemPrompts {
		got = append(got, count[seededText("system", uint64(k), c.SystemTokens)])
	}
	// Weights 1, 1/2, 1/3, 1/4 of 2,000; three standard deviations are about 65.
	for k, want := range []int{960, 480, 320, 240} {
		if got[k] < want-65 || got[k] > want+65 {
			t.Errorf("prompts chosen %v times, want about 960, 480, 320, 240", got)
			break
		}
	}
}
