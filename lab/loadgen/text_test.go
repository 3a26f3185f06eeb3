package loadgen

import (
	"strings"
	"testing"

	"warmroute/lab/replay"
)

func TestTraceMessagesShareBlocks(t *testing.T) {
	content := func(tokens int, blocks ...uint64) string {
		return traceMessages(replay.TraceRequest{PromptTokens: tokens, Blocks: blocks}, 512)[0].Content
	}
	f := func(a, b string, wantBlocks int) {
		t.Helper()
		n := 0
		for n < min(len(a), len(b)) && a[n] == b[n] {
			n++
		}
		// Two blocks of different ids may agree in a few characters.
		if n < wantBlocks*2048 || n > wantBlocks*2048+10 {
			t.Errorf("%d characters shared, want %d", n, wantBlocks*2048)
		}
	}
	f(content(1536, 0, 1, 2), content(1600, 0, 1, 3, 4), 2)
	f(content(512, 0), content(512, 1), 0)
	f(content(512, 1), content(512, 36), 0)
	f(content(1100, 0, 1, 2), content(1500, 0, 1, 3), 2)
	if got := len(content(1100, 0, 1, 2)); got != 4400 {
		t.Errorf("1,100 tokens became %d characters, want 4400", got)
	}
}

func FuzzTraceMessages(f *testing.F) {
	f.Add(uint16(600), uint16(512), uint64(7))
	f.Fuzz(func(t *testing.T, tokens, blockTokens uint16, id uint64) {
		if tokens == 0 || blockTokens == 0 || tokens/blockTokens > 1<<10 {
			return
		}
		r := replay.TraceRequest{PromptTokens: int(tokens)}
		for len(r.Blocks)*int(blockTokens) < int(tokens) {
			r.Blocks = append(r.Blocks, id+uint64(len(r.Blocks)))
		}
		if n := len(traceMessages(r, int(blockTokens))[0].Content); n != int(tokens)*4 {
			t.Fatalf("%d tokens became %d characters", tokens, n)
		}
	})
}

func TestTextIsASCII(t *testing.T) {
	for id := range uint64(1000) {
		s := seededText("", id, 512)
		if len(s) != 2048 || strings.ContainsFunc(s, func(r rune) bool { return r != ' ' && (r < '0' || r > 'z') }) {
			t.Fatalf("id %d: %d characters, %q", id, len(s), s[:40])
		}
	}
}

func BenchmarkTraceMessages(b *testing.B) {
	r := replay.TraceRequest{PromptTokens: 27 * 512}
	for id := range uint64(27) {
		r.Blocks = append(r.Blocks, id)
	}
	b.ReportAllocs()
	for b.Loop() {
		traceMessages(r, 512)
	}
}
