package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"warmroute/replay"
)

func demoFigures() []replay.Summary {
	return []replay.Summary{
		{Policy: "round-robin", Requests: 10, HitRatio: 0.4, TTFTMean: 0.3, TTFTP50: 0.2, TTFTP99: 1, E2EMean: 1},
		{Policy: "prefix", Requests: 12, HitRatio: 0.8, TTFTMean: 0.1, TTFTP50: 0.1, TTFTP99: 0.5, E2EMean: 0.7},
	}
}

func TestDemoScreenComparesTheTwo(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.finish(20*time.Second, demoFigures())
	want := "prefix / round-robin: hits × 2.00, TTFT × 0.33 (p50 0.50, p99 0.50), E2E × 0.70\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("got %s, want in it %s", &out, want)
	}
}

func TestDemoScreenWritesLinesWhereThereIsNoTerminal(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.update(5*time.Second, demoFigures())
	s.update(10*time.Second, demoFigures())
	if got := out.String(); strings.Count(got, "\n") != 2 || strings.Contains(got, "\x1b") {
		t.Errorf("got %q, want two lines without escapes", got)
	}
}

func TestDemoScreenReplacesTheLastFrameOnATerminal(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.terminal = true
	s.update(0, []replay.Summary{{Policy: "round-robin"}, {Policy: "prefix"}})
	first := strings.Count(out.String(), "\n")
	out.Reset()
	s.update(time.Second, demoFigures())
	if got, want := out.String(), "\x1b["+string(rune('0'+first))+"A\x1b[J"; !strings.Contains(got, want) {
		t.Errorf("got %q, want %q in it", got, want)
	}
}
