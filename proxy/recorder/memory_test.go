package recorder

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
)

// timestampsOf returns those of the entries that a memory has.
func timestampsOf(t *testing.T, m *memory) (timestamps []uint64) {
	t.Helper()
	var e entry
	for _, c := range m.chunks {
		for rest := c.entries; len(rest) > 0; {
			var err error
			if rest, err = e.parseBinary(rest); err != nil {
				t.Fatal(err)
			}
			timestamps = append(timestamps, e.timestamp)
		}
	}
	return timestamps
}

func TestMemoryKeepsLastHour(t *testing.T) {
	m := memory{max: 1 << 20}
	start := time.Now()
	for minute := range 150 {
		m.add(&entry{timestamp: uint64(minute)}, start.Add(time.Duration(minute)*time.Minute))
	}
	kept := timestampsOf(t, &m)
	if first, last := kept[0], kept[len(kept)-1]; first != 89 || last != 149 || len(kept) != 61 {
		t.Errorf("%d entries from %d to %d", len(kept), first, last)
	}
	if !m.cutAt.IsZero() {
		t.Error("entries were removed for lack of room")
	}
	if m.trim(start.Add(10 * time.Hour)); len(m.chunks) != 0 || m.bytes != 0 {
		t.Errorf("%d chunks of %d bytes are left", len(m.chunks), m.bytes)
	}
}

func TestMemoryBound(t *testing.T) {
	m := memory{max: 1 << 20}
	start := time.Now()
	e := entry{runs: make([]uint64, 500)}
	for i := range 5000 {
		e.timestamp = uint64(i)
		m.add(&e, start.Add(time.Duration(i)*time.Millisecond))
		if m.bytes > m.max {
			t.Fatalf("%d bytes after %d entries, at most %d", m.bytes, i+1, m.max)
		}
	}
	if m.bytes < m.max/2 {
		t.Errorf("only %d bytes are kept, of %d", m.bytes, m.max)
	}
	if m.cutAt.IsZero() {
		t.Error("nothing says that entries were removed for lack of room")
	}
	if kept := timestampsOf(t, &m); kept[len(kept)-1] != 4999 || kept[0] != 5000-uint64(len(kept)) {
		t.Errorf("%d entries from %d to %d", len(kept), kept[0], kept[len(kept)-1])
	}
}

// TestMemoryOfNumbers expects that the numbers of blocks take no more of the memory than is meant for them, with long
// runs and with short ones.
func TestMemoryOfNumbers(t *testing.T) {
	const bound = 32 << 20
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, length := range []int{1, 10, 1000} {
		before := heap()
		n := blockNumbers{minKnown: bound / memoryPerKnownBlock}
		blocks, next := make([]prompt.Block, length), prompt.Block(1)
		for range 4 * n.minKnown / (length + runOverhead) {
			for i := range blocks {
				blocks[i] = next * 0x9e3779b97f4a7c15
				next++
			}
			n.findOrAssign(blocks)
		}
		if took := heap() - before; took > bound/2 {
			t.Errorf("runs of %d blocks: %d MiB", length, took>>20)
		}
		runtime.KeepAlive(n)
	}
}

func TestRecent(t *testing.T) {
	r, err := New(Options{Settings: Settings{Memory: 1 << 20}, BlockBytes: 256, Dropped: func() { t.Error("dropped a request") }})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		q := r.NewRequest()
		q.Arrived, q.Model, q.Bytes, q.Code = time.Now(), fmt.Sprint("m", i%2), 1000, 200
		r.write(q)
	}
	recent := r.Recent()
	if recent.Cut || fmt.Sprint(recent.Models) != "map[m0:0 m1:1]" {
		t.Errorf("got %+v", recent)
	}
	var all bytes.Buffer
	if err := recent.WriteLines(&all, recent.Header); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(all.String()), "\n")
	if len(lines) != 4 || lines[0]+"\n" != string(r.encode.headerLine) || !strings.Contains(lines[2], `"model":1`) {
		t.Errorf("got %s", all.String())
	}
}

func TestNoMemory(t *testing.T) {
	r := newRecorder(t, t.TempDir()+"/traffic", 1<<20, 1)
	r.run(many(3)...)
	if recent := r.Recent(); recent != nil || len(r.memory.chunks) != 0 {
		t.Errorf("%+v is kept", recent)
	}
}

// conversations returns requests of 100 conversations at a time, whose prompts grow from 40 blocks by 10.
func conversations(rng *rand.Rand, n int) []Request {
	out, open, next := make([]Request, n), make([][]prompt.Block, 100), prompt.Block(1)
	for i := range out {
		c := &open[rng.IntN(len(open))]
		if len(*c) > 300 {
			*c = nil
		}
		for range max(10, 40-len(*c)) {
			*c = append(*c, next)
			next++
		}
		out[i] = Request{
			Arrived: time.Now(), Model: "m", Conversation: rng.Uint64N(1000), Streams: true, Bytes: 256*len(*c) + rng.IntN(256), Plain: true,
			Blocks:       *c,
			PromptTokens: 64 * len(*c), CachedTokens: 64 * rng.IntN(len(*c)), CachedKnown: true, OutputTokens: rng.IntN(500), Code: 200,
			TTFT: time.Duration(rng.IntN(1e9)), Duration: time.Duration(rng.IntN(1e10)),
		}
	}
	return out
}

func BenchmarkMemory(b *testing.B) {
	r, err := New(Options{Settings: Settings{Memory: 32 << 20}, BlockBytes: 256, Dropped: func() {}})
	if err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	requests := conversations(rng, b.N)
	b.ResetTimer()
	for i := range requests {
		q := r.NewRequest()
		blocks := append(q.Blocks, requests[i].Blocks...)
		*q = requests[i]
		q.Blocks = blocks
		r.write(q)
	}
	b.ReportMetric(float64(r.memory.bytes)/float64(b.N), "B/request")
}
