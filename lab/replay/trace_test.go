package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseTrace(t *testing.T) {
	got, err := ParseTrace(strings.NewReader(
		`{"timestamp": 0, "input_length": 600, "output_length": 5, "session": 0, "hash_ids": [0, 7]}` + "\n\n" +
			`{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [0]}` + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []TraceRequest{
		{At: 0, PromptTokens: 600, OutputTokens: 5, Blocks: []uint64{0, 7}, Conversation: 1},
		{At: 3 * time.Second, PromptTokens: 512, OutputTokens: 1, Blocks: []uint64{0}},
	}
	if !reflect.DeepEqual(got.Requests, want) {
		t.Errorf("got %+v, want %+v", got.Requests, want)
	}
}

func TestParseTraceErrorsNameTheLine(t *testing.T) {
	good := `{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [0]}`
	f := func(bad, want string) {
		t.Helper()
		_, err := ParseTrace(strings.NewReader(good + "\n" + bad + "\n"))
		if err == nil || !strings.HasPrefix(err.Error(), "trace line 2: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want line 2 and %q", bad, err, want)
		}
	}
	f(`{`, "unexpected end")
	f(`{"input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp is missing")
	f(`{"timestamp": -1, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp -1")
	f(`{"timestamp": 1e300, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp 1e+300")
	f(`{"timestamp": 2999, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "earlier")
	f(`{"timestamp": 3000, "input_length": 0, "output_length": 1, "hash_ids": []}`, "input_length 0")
	f(`{"timestamp": 3000, "input_length": 99999999, "output_length": 1, "hash_ids": [0]}`, "input_length 99999999")
	f(`{"timestamp": 3000, "input_length": 10, "output_length": -1, "hash_ids": [0]}`, "output_length -1")
	f(`{"timestamp": 3000, "input_length": 513, "output_length": 1, "hash_ids": [0]}`, "makes 2 blocks")
	f(`{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [-4]}`, "hash_ids")
	f(`{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [0], "session": 18446744073709551615}`,
		"session 18446744073709551615")
	f(strings.Repeat(" ", maxTraceLineBytes+1), "too long")
}

func TestParseEmptyTrace(t *testing.T) {
	if _, err := ParseTrace(strings.NewReader("\n")); err == nil {
		t.Error("no error")
	}
}

func FuzzParseTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}`))
	f.Add([]byte("{\"timestamp\": 1}\n{\"timestamp\": 0}"))
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "session": 3, "hash_ids": [0, 7]}`))
	f.Add([]byte(`{"timestamp": 0.5, "input_length": 1e2, "hash_ids": [18446744073709551615]}`))
	f.Add([]byte(header(5000) + `
{"timestamp":40.5,"input_length":140,"input_bytes":560,"counted":true,"output_length":30,"block_runs":[7,2],"stream":true,"code":200,"model":0,"session":3}
{"timestamp":20,"input_length":64,"input_bytes":256,"output_length":0,"block_runs":[7,1],"code":503}
` + header(9000) + `
{"timestamp":0,"input_length":2000,"input_bytes":256,"counted":true,"output_length":7,"block_runs":[7,1],"code":499}
`))
	f.Add([]byte(bailianFirst + "\n" + bailianSecond))
	f.Add([]byte(wekaSession))
	f.Add([]byte(liteLLMRowInObject))
	f.Fuzz(func(t *testing.T, data []byte) {
		tr, err := ParseTrace(strings.NewReader(string(data)))
		if err != nil {
			return
		}
		tr.SpreadTimestamps(1)
		tr.ScaleToLoad(0.9, 8)
		last := time.Duration(math.MinInt64)
		for _, r := range tr.Requests {
			if r.At < last {
				t.Fatalf("arrival at %v after one at %v", r.At, last)
			}
			last = r.At
			if n := (r.PromptTokens + tr.BlockTokens - 1) / tr.BlockTokens; len(r.Blocks) != n || n == 0 {
				t.Fatalf("%d tokens have %d blocks of %d", r.PromptTokens, len(r.Blocks), tr.BlockTokens)
			}
		}
		for i, place := range findConversations(tr.Requests, tr.BlockTokens) {
			if (place.key != 0) != (tr.Requests[i].Conversation != 0) {
				t.Fatalf("request %d of session %d is in conversation %x", i, tr.Requests[i].Conversation, place.key)
			}
		}
	})
}

// at makes a trace of requests with these stamps in milliseconds, each of so many tokens.
func at(tokens int, stamps ...int) *Trace {
	t := &Trace{}
	for _, ms := range stamps {
		t.Requests = append(t.Requests, TraceRequest{At: time.Duration(ms) * time.Millisecond, PromptTokens: tokens})
	}
	return t
}

func TestSpreadStaysBelowNextTimestamp(t *testing.T) {
	tr := at(1, 0, 0, 0, 3000, 10_000, 10_000, 20_000, 20_000)
	tr.SpreadTimestamps(1)
	inside := func(i int, from, to time.Duration) {
		t.Helper()
		if got := tr.Requests[i].At; got < from || got > to {
			t.Errorf("request %d at %v, want %v to %v", i, got, from, to)
		}
	}
	for i := range 3 {
		inside(i, 0, 3*time.Second)
	}
	inside(3, 3*time.Second, 3*time.Second) // a stamp of its own is left alone
	for i := 4; i < 6; i++ {
		inside(i, 10*time.Second, 13100*time.Millisecond) // 3.1 s at most
	}
	for i := 6; i < 8; i++ {
		inside(i, 20*time.Second, 23100*time.Millisecond) // the last stamp has no next
	}
	for i := range tr.Requests[1:] {
		if tr.Requests[i].At > tr.Requests[i+1].At {
			t.Errorf("request %d is later than the next", i)
		}
	}
	if tr.Requests[0].At == tr.Requests[1].At {
		t.Error("equal stamps stayed equal")
	}
}

func TestSpreadIsDeterministic(t *testing.T) {
	f := func(seed uint64) string {
		tr := at(1, 0, 0, 0, 3000)
		tr.SpreadTimestamps(seed)
		return fmt.Sprint(tr.Requests)
	}
	if first, again := f(1), f(1); first != again {
		t.Error("one seed gave two arrivals")
	}
	if f(1) == f(2) {
		t.Error("two seeds gave one arrival")
	}
}

func TestScaleToLoad(t *testing.T) {
	// 4 × 88,000 tokens in 4 s on two backends of 44,000 tokens/s: all they can do, but for one token of output each.
	tr := at(88_000, 1000, 2000, 3000, 5000)
	if got := tr.Load(2); math.Abs(got-1) > 0.002 {
		t.Errorf("load %v, want 1", got)
	}
	tr.ScaleToLoad(0.5, 2)
	want := []time.Duration{0, 2 * time.Second, 4 * time.Second, 8 * time.Second}
	for i, r := range tr.Requests {
		if r.At != want[i] {
			t.Errorf("request %d at %v, want %v", i, r.At, want[i])
		}
	}
	if got := tr.Load(2); math.Abs(got-0.5) > 1e-9 {
		t.Errorf("load %v, want 0.5", got)
	}
}

func TestScaleOfOneInstant(t *testing.T) {
	tr := at(16_000, 1000, 1000)
	tr.ScaleToLoad(0.5, 2)
	if got := tr.Requests[1].At; got != time.Second {
		t.Errorf("arrival at %v, want 1s", got)
	}
}

func TestContinuations(t *testing.T) {
	request := func(prompt, output int, ids ...uint64) TraceRequest {
		return TraceRequest{PromptTokens: prompt, OutputTokens: output, Blocks: ids}
	}
	list := []TraceRequest{
		0: request(1100, 600, 0, 1, 2),          // continued by 3
		1: request(600, 600, 0, 5),              // only the block that all share
		2: request(1500, 100, 0, 1, 3),          // the same two full blocks: 3 is longer than it too
		3: request(2600, 900, 0, 1, 4, 6, 7, 8), // continued by 5, not by 4
		4: request(2600, 10, 0, 1, 4, 6, 7, 9),  // as long, so no continuation
		5: request(4000, 1, 0, 1, 4, 6, 7, 10, 11, 12),
		6: request(100, 1, 13),
	}
	want := []*TraceRequest{&list[3], nil, &list[3], &list[5], &list[5], nil, nil}
	if got := findContinuations(list, 512); !slices.Equal(got, want) {
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
			if o.PromptTokens > q.PromptTokens+q.OutputTokens && slices.Equal(o.Blocks[:full], q.Blocks[:full]) {
				later[i] = o
			}
		}
	}
	return later
}

func TestContinuationsMatchNaiveSearch(t *testing.T) {
	found := 0
	for seed := range uint64(200) {
		draw := rand.New(rand.NewPCG(seed, 0))
		list := make([]TraceRequest, 60)
		for i := range list {
			prompt := 10 + draw.IntN(60)
			list[i] = TraceRequest{PromptTokens: prompt, OutputTokens: 1 + draw.IntN(20)}
			for range blockCount(prompt, 10) {
				list[i].Blocks = append(list[i].Blocks, draw.Uint64N(3)/2)
			}
		}
		want := naively(list, 10)
		if got := findContinuations(list, 10); !slices.Equal(got, want) {
			t.Fatalf("seed %d: got %v, want %v", seed, got, want)
		}
		found += len(want) - slices.IndexFunc(want, func(q *TraceRequest) bool { return q != nil })
	}
	if found == 0 {
		t.Error("nothing was ever continued")
	}
}

// Runs of one trace differ by seed, load and policy, and are many.
func TestContinuationsMemory(t *testing.T) {
	trace := &Trace{BlockTokens: 1}
	for i := range 500 {
		blocks := make([]uint64, 4000)
		blocks[1] = uint64(i)
		trace.Requests = append(trace.Requests, TraceRequest{PromptTokens: len(blocks), OutputTokens: 1, Blocks: blocks})
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
	trace.Truncate(10)
	if n := len(trace.continuations()); n != 10 {
		t.Errorf("%d continuations of 10 requests that are left", n)
	}
}

func TestOutputIsHitByContinuation(t *testing.T) {
	w := Traced{Trace: &Trace{BlockTokens: 512, Requests: []TraceRequest{
		{At: 0, PromptTokens: 1100, OutputTokens: 600, Blocks: []uint64{0, 1, 2}},
		{At: 0, PromptTokens: 1100, OutputTokens: 600, Blocks: []uint64{0, 8, 9}},
		{At: time.Minute, PromptTokens: 2000, OutputTokens: 1, Blocks: []uint64{0, 1, 4, 6}},
	}}}
	r, err := w.Requests(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := r.Open[0], r.Open[1], r.Open[2]
	if len(a.Blocks) != 2 || len(a.Reply) != 1 || a.Reply[0] != c.Blocks[2] || len(c.Blocks) != 3 || len(c.Reply) != 0 {
		t.Errorf("the first prompt has blocks %v and its output %v, the one that continues it %v", a.Blocks, a.Reply, c.Blocks)
	}
	if b.Blocks[0] != a.Blocks[0] || b.Blocks[1] == a.Blocks[1] || b.Reply[0] == a.Reply[0] {
		t.Errorf("blocks of different ids, %v %v and %v %v", a.Blocks, a.Reply, b.Blocks, b.Reply)
	}
	if a.PromptKey == b.PromptKey || a.PromptKey != c.PromptKey || a.Conversation != a.PromptKey {
		t.Errorf("heads %x, %x and %x: want them by the second id", a.PromptKey, b.PromptKey, c.PromptKey)
	}
	if a.At != 0 || b.At <= a.At || b.At > maxSpread || c.At < 56*time.Second {
		t.Errorf("arrivals at %v, %v and %v", a.At, b.At, c.At)
	}
	_, sum := mustPlay(t, &Scenario{Backends: 1, Policy: "prefix", Workload: w})
	if want := (1536.0 + 512) / 4200; sum.HitRatio != want {
		t.Errorf("hit ratio %.3f, want %.3f: three blocks and one", sum.HitRatio, want)
	}
}

func TestTracedLoad(t *testing.T) {
	trace := &Trace{BlockTokens: 512, Requests: []TraceRequest{
		{At: 0, PromptTokens: 22_000, OutputTokens: 1, Blocks: make([]uint64, 43)},
		{At: time.Hour, PromptTokens: 22_000, OutputTokens: 1, Blocks: make([]uint64, 43)},
	}}
	r, err := Traced{Trace: trace, Load: 0.25}.Requests(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if r.Open[1].At.Round(10*time.Millisecond) != 2*time.Second || trace.Requests[1].At != time.Hour {
		t.Errorf("the second request arrives at %v, and the trace itself has it at %v; want about 2s and still 1h", r.Open[1].At,
			trace.Requests[1].At)
	}
}
