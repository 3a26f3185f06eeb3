package main

import (
	"bytes"
	"fmt"
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
	for _, want := range []string{
		"hit ratio              0.400        0.800    × 2.00\n",
		"TTFT ms, mean            300          100    × 0.33\n",
		"time to first token  round-robin  ################################ 300 ms\n",
		"time to first token  prefix       ########### 100 ms\n",
		"prompt from cache    prefix       ########################## 80 %\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("got %s, want in it %s", &out, want)
		}
	}
	for line := range strings.Lines(out.String()) {
		if len(line) > 81 {
			t.Errorf("wider than 80 columns: %s", line)
		}
	}
}

func TestDemoScreenColoursOnlyWhereItMay(t *testing.T) {
	f := func(colour, blocks bool, variables ...string) {
		t.Helper()
		for i, name := range []string{"TERM", "NO_COLOR", "LANG"} {
			t.Setenv(name, variables[i])
		}
		t.Setenv("LC_ALL", "")
		t.Setenv("LC_CTYPE", "")
		if got := terminalStyle(); got != (style{colour, blocks}) {
			t.Errorf("%q: %+v", variables, got)
		}
	}
	f(true, true, "xterm", "", "de_DE.UTF-8")
	f(false, true, "xterm", "1", "C.UTF-8")
	f(false, false, "dumb", "", "C")
	f(false, false, "", "", "")
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
	t.Setenv("TERM", "xterm")
	s.update(0, []replay.Summary{{Policy: "round-robin"}, {Policy: "prefix"}})
	first := strings.Count(out.String(), "\n")
	out.Reset()
	s.update(time.Second, demoFigures())
	if got, want := out.String(), fmt.Sprintf("\x1b[%dA\x1b[J", first); !strings.Contains(got, want) {
		t.Errorf("got %q, want %q in it", got, want)
	}
}
