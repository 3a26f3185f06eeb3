package replay

import (
	"math"
	"slices"
	"testing"
	"time"
)

func mustMake(t *testing.T, w Workload, backends int) *Requests {
	t.Helper()
	r, err := w.Requests(backends, 1)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// near fails when a figure is off by more than a share of what it should be.
func near(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if math.Abs(got-want) > share*want {
		t.Errorf("%s is %.4g, want about %.4g", what, got, want)
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

func TestAgenticConcurrency(t *testing.T) {
	for _, n := range []int{48, 400, 700} {
		if r := mustMake(t, Agentic{Concurrency: n}, 8); len(r.Open) != n {
			t.Errorf("of %d sessions at once %d begin", n, len(r.Open))
		}
	}
}

func TestAgenticSessions(t *testing.T) {
	r := mustMake(t, Agentic{Concurrency: 48, Sessions: 4000}, 8)
	if len(r.Open) != 48 || r.Open[47].At != 47*agenticStartInterval {
		t.Fatalf("%d sessions begin by themselves, the last at %v", len(r.Open), r.Open[len(r.Open)-1].At)
	}
	var first, later, outputs, pauses []float64
	sessions, turns := 0, 0
	ends, ending := 0.0, 0.0 // sessions that ended where the next turn would have fit, and how many should have
	queue := slices.Clone(r.Open)
	for len(queue) > 0 {
		j := queue[0]
		queue = queue[1:]
		s := j.session.(*agenticSession)
		turns++
		outputs = append(outputs, float64(j.Output))
		if s.done == 1 {
			sessions++
			first = append(first, float64(j.Prompt-82*512))
		} else {
			before := s.turns[s.done-2]
			later = append(later, float64(j.Prompt-before.prompt-before.output))
			pauses = append(pauses, s.turns[s.done-1].pause.Seconds())
		}
		if j.Prompt+j.Output > 200_000 || len(j.Blocks) != j.Prompt/512 || len(j.Blocks)+len(j.Reply) != (j.Prompt+j.Output)/512 {
			t.Fatalf("a turn of %d and %d tokens in %d and %d blocks", j.Prompt, j.Output, len(j.Blocks), len(j.Reply))
		}
		if context := j.Prompt + j.Output; context <= 140_000 {
			ending += 0.05 * (1 + 1.5*float64(context)/200_000)
			if s.done == len(s.turns) {
				ends++
			}
		}
		now := j.At + time.Minute
		if next := r.Next(j, now); next != nil {
			queue = append(queue, next)
			if next.session == j.session && !slices.Equal(next.Blocks[:len(j.Blocks)+len(j.Reply)], slices.Concat(j.Blocks, j.Reply)) {
				t.Fatal("a turn does not begin with the one before it and its output")
			}
			if next.session != j.session && next.At != now+nextSessionDelay {
				t.Fatalf("the next session begins %v after the last", next.At-now)
			}
		}
	}
	if sessions != 4000 || turns != r.Total {
		t.Errorf("%d sessions and %d turns, want 4000 and %d", sessions, turns, r.Total)
	}
	near(t, "median of first turns", median(first), math.Exp(8.517), 0.08)
	near(t, "median of later turns", median(later), math.Exp(8.294), 0.03)
	near(t, "median of outputs", median(outputs), math.Exp(6.685), 0.02)
	// 0.7 Φ((x-7.601)/1.354) + 0.3 Φ((x-9.616)/1.177) is one half at x = 8.19.
	near(t, "median of pauses", median(pauses), math.Exp(8.19)/1000, 0.05)
	near(t, "number of sessions ended by chance", ends, ending, 0.05)
}

func TestAgenticGroupPrompt(t *testing.T) {
	r := mustMake(t, Agentic{Concurrency: 300}, 8)
	if len(r.Open) != 300 {
		t.Fatalf("%d sessions at once", len(r.Open))
	}
	groups, own, long := map[uint64]int{}, map[uint64]bool{}, 0
	for _, j := range r.Open {
		if j.Blocks[61] != r.Open[0].Blocks[61] {
			t.Fatal("two sessions do not share the first 62 blocks")
		}
		if len(j.Blocks) > 82 {
			own[uint64(j.Blocks[82])] = true
			long++
		}
		groups[uint64(j.Blocks[81])]++
	}
	most := 0
	for _, n := range groups {
		most = max(most, n)
	}
	if len(own) != long {
		t.Errorf("%d sessions have %d different blocks behind their group's", long, len(own))
	}
	// Zipf 0.6 over 100 groups gives the first one 7.2 % of 300.
	if len(groups) < 60 || most < 9 || most > 35 {
		t.Errorf("%d groups, the largest with %d sessions of 300", len(groups), most)
	}
}

func TestSharedPrompts(t *testing.T) {
	f := func(name string, w SharedPrompts, load, output, firstShare float64, blocks int) {
		t.Helper()
		w.For = 20 * time.Minute
		r := mustMake(t, w, 8)
		prompts, outputs := 0, 0.0
		by := map[uint64]int{}
		for _, j := range r.Open {
			prompts += j.Prompt
			outputs += float64(j.Output)
			by[j.PromptKey]++
			if len(j.Blocks) != blocks {
				t.Fatalf("%s: %d blocks, want %d", name, len(j.Blocks), blocks)
			}
		}
		near(t, name+": load", float64(prompts)/(w.For.Seconds()*8*nominalRate), load, 0.02)
		near(t, name+": mean output", outputs/float64(len(r.Open)), output, 0.02)
		near(t, name+": share of the first prompt", float64(by[mixBits(0)])/float64(len(r.Open)), firstShare, 0.05)
	}
	mean := math.Exp(0.125) // of lognormal(0, 0.5)
	f("one hot prompt at 20 requests a second", HotPrompts(1, 20), 0.1186, 300*mean, 1, 4)
	f("one hot prompt at 60 requests a second", HotPrompts(1, 60), 0.3559, 300*mean, 1, 4)
	f("eight hot prompts", HotPrompts(8, 20), 0.1186, 300*mean, 0.3092, 4)
	f("chats", ChatsOnSmallCaches(), 1.5, 250*mean, 0.1701, 3)
}

func TestDocuments(t *testing.T) {
	w := Documents{Load: 1.5, For: time.Hour}
	r := mustMake(t, w, 8)
	asked := map[uint64]int{}
	for i, j := range r.Open {
		asked[j.PromptKey]++
		if j.Prompt != 20_100 || len(j.Blocks) != 39 || i > 0 && j.At < r.Open[i-1].At {
			t.Fatalf("question %d at %v is of %d tokens in %d blocks", i, j.At, j.Prompt, len(j.Blocks))
		}
	}
	for document, n := range asked {
		if n < 2 || n > 6 {
			t.Fatalf("document %x is asked about %d times", document, n)
		}
	}
	near(t, "questions a document", float64(len(r.Open))/float64(len(asked)), 4, 0.02)
	near(t, "load", float64(len(r.Open))*20_100/(time.Hour.Seconds()*8*nominalRate), 1.5, 0.05)
}

func TestInvalidWorkloads(t *testing.T) {
	for name, w := range map[string]Workload{
		"agentic without sessions": Agentic{},
		"no prompts":               SharedPrompts{Rate: 1, PromptTokens: 1, For: time.Second},
		"no rate":                  SharedPrompts{Prompts: 1, PromptTokens: 1, For: time.Second},
		"no time":                  SharedPrompts{Prompts: 1, PromptTokens: 1, Rate: 1},
		"documents without a load": Documents{},
		"no trace":                 Traced{},
	} {
		if _, err := w.Requests(8, 1); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
