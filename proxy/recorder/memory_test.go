package recorder

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
)

// linesOf returns the lines that a memory has.
func linesOf(t *testing.T, m *memory) []string {
	t.Helper()
	var stream bytes.Buffer
	for _, c := range m.chunks {
		stream.Write(c.member)
	}
	stream.Write(m.compress(m.lines))
	text, err := gzip.NewReader(&stream)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(text)
	if err != nil {
		t.Fatal(err)
	}
	return strings.SplitAfter(string(all), "\n")[:strings.Count(string(all), "\n")]
}

func TestMemoryKeepsLastHour(t *testing.T) {
	m := memory{max: 1 << 20}
	start := time.Now()
	for minute := range 150 {
		m.addLine(fmt.Appendf(nil, "%d\n", minute), start.Add(time.Duration(minute)*time.Minute))
	}
	// A line waits for a second one, and a chunk goes when both are older than an hour.
	lines := linesOf(t, &m)
	if first, last := lines[0], lines[len(lines)-1]; first != "88\n" || last != "149\n" || len(lines) != 62 {
		t.Errorf("%d lines from %q to %q", len(lines), first, last)
	}
	if !m.cutAt.IsZero() {
		t.Error("lines were removed for lack of room")
	}
	if m.trim(start.Add(10 * time.Hour)); len(m.chunks) != 0 || m.bytes != 0 {
		t.Errorf("%d chunks of %d bytes are left", len(m.chunks), m.bytes)
	}
}

func TestMemoryBound(t *testing.T) {
	m := memory{max: 1 << 20}
	start, rng := time.Now(), rand.New(rand.NewPCG(1, 1))
	line := make([]byte, 1000)
	for i := range 5000 {
		for k := range line {
			line[k] = byte(rng.Uint32()) // incompressible
		}
		line[len(line)-1] = '\n'
		m.addLine(line, start.Add(time.Duration(i)*time.Millisecond))
		if size := m.bytes + len(m.lines); size > m.max {
			t.Fatalf("%d bytes after %d lines, at most %d", size, i+1, m.max)
		}
	}
	if m.bytes+len(m.lines) < m.max/2 {
		t.Errorf("only %d bytes are kept, of %d", m.bytes, m.max)
	}
	if m.cutAt.IsZero() {
		t.Error("nothing says that lines were removed for lack of room")
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
	var stream bytes.Buffer
	if err := recent.WriteGzip(&stream, recent.Header); err != nil {
		t.Fatal(err)
	}
	text, err := gzip.NewReader(&stream)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(text)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(all)), "\n")
	if len(lines) != 4 || lines[0]+"\n" != string(r.encode.headerLine) || !strings.Contains(lines[2], `"model":1`) {
		t.Errorf("got %s", all)
	}
}

func TestNoMemory(t *testing.T) {
	r := newRecorder(t, t.TempDir()+"/traffic", 1<<20, 1)
	r.run(many(3)...)
	if recent := r.Recent(); recent != nil || len(r.memory.lines) != 0 {
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
			Arrived: time.Now(), Model: "m", Session: rng.Uint64N(1000), Streams: true, Bytes: 256*len(*c) + rng.IntN(256), Plain: true, Blocks: *c,
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
	b.ReportMetric(float64(r.memory.bytes+len(r.memory.lines))/float64(b.N), "B/request")
}
