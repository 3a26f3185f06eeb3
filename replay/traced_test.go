package replay

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
)

func TestContinuations(t *testing.T) {
	request := func(prompt, answer int, ids ...uint64) TraceRequest {
		return TraceRequest{PromptTokens: prompt, AnswerTokens: answer, Blocks: ids}
	}
	list := []TraceRequest{
		0: request(1100, 600, 0, 1, 2),          // continued by 3
		1: request(600, 600, 0, 5),              // only the block that all share: nobody's
		2: request(1500, 100, 0, 1, 3),          // the same two full blocks: 3 is longer than it too
		3: request(2600, 900, 0, 1, 4, 6, 7, 8), // continued by 5, not by 4
		4: request(2600, 10, 0, 1, 4, 6, 7, 9),  // as long, so no continuation
		5: request(4000, 1, 0, 1, 4, 6, 7, 10, 11, 12),
		6: request(100, 1, 13),
	}
	want := []*TraceRequest{&list[3], nil, &list[3], &list[5], &list[5], nil, nil}
	if got := continuations(list, 512); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// naively goes through all later requests.
func naively(requests []TraceRequest, blockTokens int) []*TraceRequest {
	later := make([]*TraceRequest, len(requests))
	for i, q := range requests {
		full := q.PromptTokens / blockTokens
		for k := i + 1; k < len(requests) && full >= 2 && later[i] == nil; k++ {
			o := &requests[k]
			if o.PromptTokens > q.PromptTokens+q.AnswerTokens && slices.Equal(o.Blocks[:full], q.Blocks[:full]) {
				later[i] = o
			}
		}
	}
	return later
}

func TestContinuationsAreThoseOfTheNaiveSearch(t *testing.T) {
	found := 0
	for seed := range uint64(200) {
		draw := rand.New(rand.NewPCG(seed, 0))
		list := make([]TraceRequest, 60)
		for i := range list {
			prompt := 10 + draw.IntN(60)
			list[i] = TraceRequest{PromptTokens: prompt, AnswerTokens: 1 + draw.IntN(20)}
			for range blocksOf(prompt, 10) {
				list[i].Blocks = append(list[i].Blocks, draw.Uint64N(3)/2)
			}
		}
		want := naively(list, 10)
		if got := continuations(list, 10); !slices.Equal(got, want) {
			t.Fatalf("seed %d: got %v, want %v", seed, got, want)
		}
		found += len(want) - slices.IndexFunc(want, func(q *TraceRequest) bool { return q != nil })
	}
	if found == 0 {
		t.Error("nothing was ever continued")
	}
}

// Runs of one trace differ by seed, load and policy, and are many.
func TestContinuationsAreFoundOnceForATraceAndTakeLittleMemory(t *testing.T) {
	trace := &Trace{BlockTokens: 1}
	for i := range 500 {
		blocks := make([]uint64, 4000)
		blocks[1] = uint64(i)
		trace.Requests = append(trace.Requests, TraceRequest{PromptTokens: len(blocks), AnswerTokens: 1, Blocks: blocks})
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	first := trace.continuations()
	runtime.ReadMemStats(&after)
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 1<<20 {
		t.Errorf("500 prompts of 4,000 blocks that continue nothing took %d bytes", bytes)
	}
	if again := trace.continuations(); &again[0] != &first[0] {
		t.Error("the continuations of one trace were looked for twice")
	}
	trace.Head(10)
	if n := len(trace.continuations()); n != 10 {
		t.Errorf("%d continuations of 10 requests that are left", n)
	}
}

func TestAnAnswerIsHitByTheRequestThatContinuesIt(t *testing.T) {
	w := Traced{Trace: &Trace{BlockTokens: 512, Requests: []TraceRequest{
		{At: 0, PromptTokens: 1100, AnswerTokens: 600, Blocks: []uint64{0, 1, 2}},
		{At: 0, PromptTokens: 1100, AnswerTokens: 600, Blocks: []uint64{0, 8, 9}},
		{At: time.Minute, PromptTokens: 2000, AnswerTokens: 1, Blocks: []uint64{0, 1, 4, 6}},
	}}}
	r, err := w.Requests(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := r.Open[0], r.Open[1], r.Open[2]
	if len(a.Blocks) != 2 || len(a.Reply) != 1 || a.Reply[0] != c.Blocks[2] || len(c.Blocks) != 3 || len(c.Reply) != 0 {
		t.Errorf("the first prompt has blocks %v and its answer %v, the one that continues it %v", a.Blocks, a.Reply, c.Blocks)
	}
	if b.Blocks[0] != a.Blocks[0] || b.Blocks[1] == a.Blocks[1] || b.Reply[0] == a.Reply[0] {
		t.Errorf("blocks of different ids, %v %v and %v %v", a.Blocks, a.Reply, b.Blocks, b.Reply)
	}
	if a.Head == b.Head || a.Head != c.Head || a.Session != a.Head {
		t.Errorf("heads %x, %x and %x: want them by the second id", a.Head, b.Head, c.Head)
	}
	if a.At != 0 || b.At <= a.At || b.At > stampGrid || c.At < 56*time.Second {
		t.Errorf("arrivals at %v, %v and %v", a.At, b.At, c.At)
	}
	_, sum := mustPlay(t, &Scenario{Backends: 1, Policy: "prefix", Workload: w})
	if want := (1536.0 + 512) / 4200; sum.HitRatio != want {
		t.Errorf("hit ratio %.3f, want %.3f: three blocks and one", sum.HitRatio, want)
	}
}

func TestTracesAreStretchedToTheirLoad(t *testing.T) {
	trace := &Trace{BlockTokens: 512, Requests: []TraceRequest{
		{At: 0, PromptTokens: 4000, AnswerTokens: 1, Blocks: make([]uint64, 8)},
		{At: time.Hour, PromptTokens: 4000, AnswerTokens: 1, Blocks: make([]uint64, 8)},
	}}
	r, err := Traced{Trace: trace, Load: 0.25}.Requests(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if r.Open[1].At != 2*time.Second || trace.Requests[1].At != time.Hour {
		t.Errorf("the second request arrives at %v, and the trace itself has it at %v; want 2s and still 1h", r.Open[1].At, trace.Requests[1].At)
	}
}
