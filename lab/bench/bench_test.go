package main

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestHistogramPrecision(t *testing.T) {
	for _, v := range []uint64{0, 1, 255, 256, 511, 512, 1000, 123_456, 9_876_543_210, 1 << 62} {
		got := bucketLowerBound(bucketIndex(v))
		if got > v || float64(v-got) > 0.01*float64(v) {
			t.Errorf("%d is counted as %d", v, got)
		}
	}
	var h histogram
	for i := range 1000 {
		h.add(time.Duration(i) * time.Millisecond)
	}
	for q, want := range map[float64]float64{0.5: 500, 0.99: 990} {
		if got := h.quantile(q).Seconds() * 1000; math.Abs(got-want) > 0.01*want {
			t.Errorf("quantile %v is %v ms, want about %v", q, got, want)
		}
	}
}

// A client must not miss a chunk or accept a truncated stream, however the bytes are split.
func TestStreamClientDetectsTruncation(t *testing.T) {
	two := streamHead + roleChunk + textChunk + textChunk
	for name, f := range map[string]struct {
		sent     string
		complete bool
	}{
		"complete":       {two + endChunks, true},
		"a chunk short":  {streamHead + roleChunk + textChunk + endChunks, false},
		"cut":            {two, false},
		"cut in a chunk": {two[:len(two)-10], false},
		"an error":       {"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\nno", false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, piece := range []int{1, 7, 1 << 20} {
				w := streamClient{addrs: []string{respondInPieces(t, f.sent, piece)}, size: 400, chunks: 2, interval: 1000, kind: hot}
				if err := w.readStream(t.Context(), 0, func() {}); (err == nil) != f.complete {
					t.Errorf("in pieces of %d: error %v, want complete %v", piece, err, f.complete)
				}
			}
		})
	}
}

// respondInPieces accepts one connection and sends text to it in pieces.
func respondInPieces(t *testing.T, text string, piece int) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		var h messageHead
		br := bufio.NewReader(c)
		if h.read(br) == nil {
			h.readBody(br, nil)
		}
		for rest := text; rest != ""; rest = rest[min(piece, len(rest)):] {
			io.WriteString(c, rest[:min(piece, len(rest))])
		}
	}()
	return l.Addr().String()
}

// The mock must write what the clients expect.
func TestMockRespondsToClient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := mock{streams: new(streamServer)}
	go m.serveListener(l)
	go m.streams.writeChunksUntilDone(t.Context())
	w := streamClient{addrs: []string{l.Addr().String()}, size: 1 << 10, chunks: 3, interval: 10, kind: shared}
	if err := w.readStream(t.Context(), 0, func() {}); err != nil {
		t.Error(err)
	}
	if w.seen.Load() != 3 || w.delays.quantile(0.5) > time.Minute {
		t.Errorf("%d chunks, a delay of %v", w.seen.Load(), w.delays.quantile(0.5))
	}
}

func TestPromptKinds(t *testing.T) {
	for kind, same := range map[string]float64{hot: 1, shared: 0.5, cold: 0} {
		a := newChatRequest(1, 8<<10, kind, 0, 0)
		_, one, _ := strings.Cut(string(a.renewNonce()), `"content":"You answer questions."`)
		_, two, _ := strings.Cut(string(a.renewNonce()), `"content":"You answer questions."`)
		n := 0
		for n < len(one) && one[n] == two[n] {
			n++
		}
		if share := float64(n) / float64(len(one)); math.Abs(share-same) > 0.05 {
			t.Errorf("%s: two prompts share %.2f of their text, want %.1f", kind, share, same)
		}
	}
}

func TestBudgetWorstFigure(t *testing.T) {
	r := newResults()
	for i, kind := range kinds {
		r.add(warmroute, cpuPerRequestFigure(1, kind), 10*float64(i+1))
		r.add(nginx, cpuPerRequestFigure(1, kind), 10)
	}
	r.add(direct, latencyFigure(1), 50)
	r.add(warmroute, latencyFigure(1), 80)
	r.add(sglang, latencyFigure(1), 150)
	want := map[string]float64{"CPU per request, 1 KB" + nginx: 3, "added p50, 1 client, 8 KB" + sglang: 0.3}
	for _, v := range r.checkBudgets() {
		expected, measured := want[v.What+v.Against]
		if measured != (v.Is != nil) || measured && math.Abs(*v.Is-expected) > 1e-9 {
			t.Errorf("%s over %s: %v, want %v (measured %v)", v.What, v.Against, v.Is, expected, measured)
		}
		if v.Missed {
			t.Errorf("%s over %s is missed", v.What, v.Against)
		}
	}
}

// CPU time and memory include a contender's children, and stop ends them.
func TestProcessTree(t *testing.T) {
	p, err := startProcess(t.TempDir(), "busy", exec.Command("sh", "-c", "while :; do :; done & wait"))
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	var used time.Duration
	if err := p.await(t.Context(), time.Minute, func() bool { used, err = p.cpuTime(); return err != nil || used > 0 }); err != nil {
		t.Fatal(err)
	}
	pids := processTree(p.PID())
	if bytes, err := p.rss(); len(pids) != 2 || bytes == 0 || err != nil {
		t.Fatalf("processes %v have %d bytes, error %v", pids, bytes, err)
	}
	p.stop()
	if err := p.checkAlive(); err == nil {
		t.Error("a process that was stopped is alive")
	}
	for syscall.Kill(pids[1], 0) == nil { // until its new parent has reaped it
		if stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pids[1])); strings.Contains(string(stat), ") Z ") {
			break
		}
		if t.Context().Err() != nil {
			t.Fatal("the child lives on")
		}
		time.Sleep(time.Millisecond)
	}
}
