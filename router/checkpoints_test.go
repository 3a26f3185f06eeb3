package router

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
)

// checkpointModel is a model whose cache keeps checkpoints, as vLLM 0.32 was measured with it.
type checkpointModel struct {
	name      string
	alignment int
	user      int // tokens of a user's text
	cached    map[string]int
}

// checkpointModels have the tokens that vLLM reported as cached for the prompts of probeCheckpoints.
var checkpointModels = []checkpointModel{
	{"sliding window", 32, 150, map[string]int{ // Gemma 3, window 512
		"again": 2528, "turn 2": 2528, "turn 3": 2720, "turn 4": 2880,
		"user 2": 0, "user 3": 2400, "user 4": 2400, "user 5": 2400,
		"turn 2 edited": 2560, "turn 2 edited again": 2560, "turn 3 edited": 2816,
		"half": 0, "half again": 1184, "half a third time": 1184,
		"turn 3 of 6": 1120, "turn 5 of 6": 1984, "short again": 192, "short, longer": 192,
	}},
	{"linear attention", 544, 900, map[string]int{ // Qwen 3.5
		"again": 3264, "turn 2": 3264, "turn 3": 3808, "turn 4": 4896,
		"user 2": 0, "user 3": 2176, "user 4": 2176, "user 5": 2176,
		"turn 2 edited": 3264, "turn 2 edited again": 3264, "turn 3 edited": 3808,
		"half": 0, "half again": 1088, "half a third time": 1088,
		"turn 3 of 6": 1088, "turn 5 of 6": 1632, "short again": 0, "short, longer": 0,
	}},
	{"full attention", 16, 900, map[string]int{ // Qwen 2
		"again": 3296, "turn 2": 3312, "turn 3": 4240, "turn 4": 5168,
		"user 2": 2400, "user 3": 2400, "user 4": 2400, "user 5": 2400,
		"turn 2 edited": 3312, "turn 2 edited again": 3312, "turn 3 edited": 4304,
		"half": 1200, "half again": 1200, "half a third time": 1200,
		"turn 3 of 6": 1136, "turn 5 of 6": 1984, "short again": 192, "short, longer": 192,
	}},
}

// probeCheckpoints calls ask with prompts that share beginnings as those of conversations do, in turn. ask returns the output.
func probeCheckpoints(m *checkpointModel, ask func(name string, prompt []uint16) (output []uint16)) {
	random := rand.New(rand.NewPCG(1, 2))
	text := func(n int) (tokens []uint16) {
		for range n {
			tokens = append(tokens, uint16(random.IntN(4000)))
		}
		return tokens
	}
	system := text(2400)
	first := slices.Concat(system, text(m.user))
	firstOutput := ask("", first)
	ask("again", first)
	second := slices.Concat(first, firstOutput, text(m.user))
	secondOutput := ask("turn 2", second)
	third := slices.Concat(second, secondOutput, text(m.user))
	thirdOutput := ask("turn 3", third)
	ask("turn 4", slices.Concat(third, thirdOutput, text(m.user)))
	for _, name := range []string{"user 2", "user 3", "user 4", "user 5"} {
		ask(name, slices.Concat(system, text(m.user)))
	}
	ask("turn 2 edited", slices.Concat(first, firstOutput, text(m.user)))
	ask("turn 2 edited again", slices.Concat(first, firstOutput, text(m.user)))
	ask("turn 3 edited", slices.Concat(third[:len(second)+len(secondOutput)+70], text(200)))
	for _, name := range []string{"half", "half again", "half a third time"} {
		ask(name, slices.Concat(system[:1200], text(400)))
	}
	long := text(300)
	var turns [][]uint16
	for range 6 {
		turns = append(turns, long)
		long = slices.Concat(long, ask("", long), text(400))
	}
	ask("turn 3 of 6", slices.Concat(turns[2], text(300)))
	ask("turn 5 of 6", slices.Concat(turns[4], text(300)))
	short := text(200)
	ask("", short)
	ask("short again", short)
	ask("short, longer", slices.Concat(short, text(300)))
}

// ofTokens returns a request for a prompt of tokens of four bytes.
func ofTokens(fleet []*backends.Backend, tokens []uint16) *Request {
	r := &Request{Backends: fleet, Bytes: 4 * len(tokens), Sequences: 1, Streams: true, TextClass: prompt.TokenIDs}
	var chain uint64
	for block := range slices.Chunk(tokens[:len(tokens)/tokensPerBlock*tokensPerBlock], tokensPerBlock) {
		var bytes []byte
		for _, id := range block {
			bytes = append(bytes, byte(id), byte(id>>8))
		}
		chain = xxh3.HashSeed(bytes, chain)
		r.Blocks = append(r.Blocks, prompt.Block(chain))
	}
	return r
}

// observeCheckpoints records a poll of a replica of the model.
func (m *checkpointModel) observe(r *Router, b *backends.Backend, c *clock) {
	l := &backends.Load{
		QueuesKnown: true, Engines: 1, CacheTokens: 400_000, HitAlignment: m.alignment, BlockSize: m.alignment, PolledAt: c.now,
		OwnInFlight: b.KnownInFlight(),
	}
	if m.alignment != 16 {
		l.KeepsCheckpoints, l.PoolTokens = true, 500_000
	}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

// TestCheckpointsOfRecordedReplicas checks that what is predicted to be cached is what vLLM reported, within one alignment, or
// within one block of the index.
func TestCheckpointsOfRecordedReplicas(t *testing.T) {
	for _, m := range checkpointModels {
		t.Run(m.name, func(t *testing.T) {
			r, fleet, c := newFleet(t, 1, "prefix")
			m.observe(r, fleet[0], c)
			probeCheckpoints(&m, func(name string, tokens []uint16) (output []uint16) {
				d := mustPick(t, r, ofTokens(fleet, tokens))
				d.RecordFirstEvent()
				cached := m.cached[name]
				switch name {
				case "": // of the first prompts, and of the six turns
					cached = d.MatchedTokens
				default:
					least := cached - max(m.alignment, tokensPerBlock)
					if name == "turn 3 edited" { // between two checkpoints that are nearer than the window all blocks are kept, which only events show
						least = min(least, m.cached["turn 3"])
					}
					if d.MatchedTokens > cached+m.alignment || d.MatchedTokens < least {
						t.Errorf("%s: %d tokens predicted, %d cached", name, d.MatchedTokens, cached)
					}
				}
				d.Release(Outcome{End: Completed, PromptTokens: len(tokens), CachedTokens: cached, CachedKnown: true, OutputTokens: 24})
				m.observe(r, fleet[0], c)
				for i := range 24 {
					output = append(output, uint16(5000+i))
				}
				return output
			})
			if n := r.fleet.ledger.CacheResets(0); n != 0 {
				t.Errorf("%d cache resets were found", n)
			}
		})
	}
}

// TestMissedCheckpoint checks that a checkpoint that a request did not reuse is not taken for certain any more, and that a request
// that failed leaves none.
func TestMissedCheckpoint(t *testing.T) {
	m := &checkpointModels[1]
	r, fleet, c := newFleet(t, 1, "prefix")
	m.observe(r, fleet[0], c)
	tokens := make([]uint16, 4000)
	for i := range tokens {
		tokens[i] = uint16(i)
	}
	find := func(n int) (tokensBefore int, certain bool) {
		d := mustPick(t, r, ofTokens(fleet, tokens[:n]))
		defer d.Release(Outcome{End: NotProcessed})
		return d.entry.Prediction.Checkpoint.Tokens, d.entry.Prediction.Checkpoint.Certain
	}
	send := func(n, cached int) {
		d := mustPick(t, r, ofTokens(fleet, tokens[:n]))
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, PromptTokens: n, CachedTokens: cached, CachedKnown: true, OutputTokens: 24})
	}
	send(1200, 0)
	if tokensBefore, certain := find(1200); tokensBefore != 1088 || !certain {
		t.Errorf("a checkpoint after %d tokens, certain: %v", tokensBefore, certain)
	}
	send(2400, 0) // the replica has evicted it; a new one may be at the same place
	if tokensBefore, certain := find(1200); tokensBefore != 1088 || certain {
		t.Errorf("a checkpoint after %d tokens, certain: %v, that was not reused", tokensBefore, certain)
	}
	before := r.fleet.index.CountCheckpoints(0)
	find(4000)
	if n := r.fleet.index.CountCheckpoints(0); n != before {
		t.Errorf("%d checkpoints after a request that failed, %d before", n, before)
	}
}

// TestLaterTurnWithoutCheckpoint checks that a later turn whose checkpoint was evicted goes to the replica that holds its blocks, though
// another one is idle, and so does a new conversation that begins with these blocks.
func TestLaterTurnWithoutCheckpoint(t *testing.T) {
	for _, turn := range []prompt.TurnKind{prompt.TurnFirst, prompt.TurnLater} {
		m := &checkpointModels[1]
		r, fleet, c := newFleet(t, 2, "prefix")
		for _, b := range fleet {
			m.observe(r, b, c)
		}
		tokens := make([]uint16, 8000)
		for i := range tokens {
			tokens[i] = uint16(i)
		}
		d := mustPick(t, r, ofTokens(fleet[:1], tokens[:7000]))
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, PromptTokens: 7000, CachedKnown: true, OutputTokens: 24})
		r.fleet.index.SetCheckpointCost(0, 0) // removes all checkpoints
		m.observe(r, fleet[0], c)
		other := make([]uint16, 1000)
		defer mustPick(t, r, ofTokens(fleet[:1], other)).Release(Outcome{End: NotProcessed})
		later := ofTokens(fleet, tokens)
		later.Turn, later.PromptKey = turn, 1
		d = mustPick(t, r, later)
		if d.Backend != fleet[0] || d.MatchedTokens != 0 {
			t.Errorf("turn %v went to %s, where %d tokens are predicted; want %s and 0", turn, d.Backend.Name, d.MatchedTokens, fleet[0].Name)
		}
		d.Release(Outcome{End: NotProcessed})
	}
}
