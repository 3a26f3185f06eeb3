package replay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
)

// traceOf parses lines of a trace in Mooncake's format.
func traceOf(t *testing.T, lines ...string) *Trace {
	t.Helper()
	trace, err := ParseTrace(strings.NewReader(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// sessionLine is a request of one block, at a time in seconds.
func sessionLine(seconds, session, output int) string {
	return fmt.Sprintf(`{"timestamp": %d, "input_length": 512, "output_length": %d, "session": %d, "hash_ids": [%d]}`, 1000*seconds, output,
		session, session)
}

func TestFindConversations(t *testing.T) {
	trace := &Trace{BlockTokens: 1}
	add := func(session uint64, blocks ...uint64) {
		trace.Requests = append(trace.Requests, TraceRequest{PromptTokens: len(blocks), OutputTokens: 1, Blocks: blocks, Conversation: session})
	}
	edited := slices.Concat(slices.Repeat([]uint64{7}, 18), []uint64{8, 8, 8})
	summarized := append(slices.Repeat([]uint64{7}, 10), 9)
	add(1, slices.Repeat([]uint64{7}, 20)...) // 0
	add(1, edited...)                         // 1: begins with nine tenths of it
	add(2, edited...)                         // 2: another session
	add(1, 5, 6)                              // 3: a subagent
	add(1, append(edited, 1, 1)...)           // 4: continues 1
	add(1, 5, 6, 4)                           // 5: continues 3
	add(1, summarized...)                     // 6: less than nine tenths of 4
	add(0, 5, 6)                              // 7: no session
	first := []int{0, 0, 2, 3, 0, 3, 6}       // request of each one's conversation
	places := findConversations(trace.Requests, trace.BlockTokens)
	for i, f := range first {
		want := conversationPlace{places[f].key, prompt.TurnLater}
		if i == f {
			want.turn = prompt.TurnFirst
		}
		if places[i] != want || want.key == 0 {
			t.Errorf("request %d: %+v, want %+v", i, places[i], want)
		}
		for k, other := range first {
			if (places[i].key == places[k].key) != (f == other) {
				t.Errorf("requests %d and %d have keys %x and %x", i, k, places[i].key, places[k].key)
			}
		}
	}
	if places[7] != (conversationPlace{}) {
		t.Errorf("a request without a session has place %+v", places[7])
	}
}

// TestClosedLoop plays three sessions, two at a time.
func TestClosedLoop(t *testing.T) {
	trace := traceOf(t,
		sessionLine(0, 0, 10), sessionLine(1, 1, 10), sessionLine(4, 0, 10), sessionLine(5, 1, 10), sessionLine(6, 0, 10), sessionLine(7, 2, 10))
	r, err := ClosedLoop{Trace: trace, Concurrency: 2}.Requests(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Open) != 2 || r.Total != 6 || r.Sessions != 3 {
		t.Fatalf("%d sessions begin, of %d with %d requests; want 2 of 3 with 6", len(r.Open), r.Sessions, r.Total)
	}
	pauses := map[uint64][]time.Duration{} // by session, from the end of each response to the next turn
	const response = 30 * time.Second
	for queue := r.Open; len(queue) > 0; queue = queue[1:] {
		j := queue[0]
		pauses[j.Conversation] = append(pauses[j.Conversation], 0)
		if next := r.Next(j, j.At+response); next != nil {
			if next.Conversation == j.Conversation {
				list := pauses[j.Conversation]
				list[len(list)-1] = next.At - j.At - response
			} else if next.At != j.At+response+nextSessionDelay {
				t.Errorf("a session begins at %v, want %v after the end of another at %v", next.At, nextSessionDelay, j.At+response)
			}
			queue = append(queue, next)
		}
	}
	want := map[uint64][]time.Duration{
		mixBits(1): {4 * time.Second, 2 * time.Second, 0},
		mixBits(2): {4 * time.Second, 0},
		mixBits(3): {0},
	}
	if fmt.Sprint(pauses) != fmt.Sprint(want) {
		t.Errorf("pauses %v, want %v", pauses, want)
	}
}

func TestClosedLoopFigures(t *testing.T) {
	trace := traceOf(t, sessionLine(0, 1, 1), sessionLine(10, 1, 1), sessionLine(20, 2, 1))
	_, s := mustPlay(t, &Scenario{Backends: 1, Policy: "prefix", Workload: ClosedLoop{Trace: trace, Concurrency: 1}})
	if got, want := s.ConversationTime, 3*s.E2EMean/2; got != want || got == 0 {
		t.Errorf("%v s for each session, want %v: three requests in two sessions", got, want)
	}
	if got, want := s.WallTime, 3*s.E2EMean+10+nextSessionDelay.Seconds(); got < want-1e-6 || got > want+1e-6 {
		t.Errorf("wall time %v, want %v", got, want)
	}
}

func TestClosedLoopRequiresSessions(t *testing.T) {
	trace := traceOf(t, `{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}`)
	if _, err := (ClosedLoop{Trace: trace, Concurrency: 1}).Requests(1, 1); err == nil || !strings.Contains(err.Error(), "names its session") {
		t.Errorf("error %v for a trace without sessions", err)
	}
}

// TestEqualSessionsAreSpread plays sessions of coding agents, of equal length and with few system prompts: the cost must not leave some
// replicas with many more of them than others, as if only where the system prompt is cached mattered.
func TestEqualSessionsAreSpread(t *testing.T) {
	const sessions, turns, blockTokens, firstBlocks, turnBlocks = 64, 20, 64, 160, 20
	trace := &Trace{BlockTokens: blockTokens}
	for turn := range turns {
		for session := range sessions {
			q := TraceRequest{At: time.Duration(turn) * 100 * time.Millisecond, OutputTokens: 40, Conversation: uint64(session + 1)}
			for block := range firstBlocks + turn*turnBlocks {
				owner := uint64(session) + 10
				if block < firstBlocks-4 {
					owner = uint64(session % 4)
				}
				q.Blocks = append(q.Blocks, owner<<32|uint64(block+1))
			}
			q.PromptTokens = len(q.Blocks) * blockTokens
			trace.Requests = append(trace.Requests, q)
		}
	}
	play := func(policy string) Summary {
		s := Scenario{Backends: 8, Policy: policy, Seed: 1, KVTokens: 600_000, NamesConversations: true,
			Workload: ClosedLoop{Trace: trace, Concurrency: sessions}}
		_, sum := mustPlay(t, &s)
		return sum
	}
	own, sticky := play("prefix"), play("sticky-least-loaded")
	if own.E2EMean > 1.05*sticky.E2EMean {
		t.Errorf("E2E %.3f s, with the same number of sessions on each replica %.3f s", own.E2EMean, sticky.E2EMean)
	}
}
