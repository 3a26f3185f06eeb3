package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/lab/replay"
)

func testDemo(t *testing.T, ctx context.Context, o demoOptions) (replay.Report, string) {
	t.Helper()
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), ignoreCleaner)
	o.backends = 4
	o.listen, o.admin, o.page = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	var out bytes.Buffer
	if err := runDemo(ctx, o, testConfigs(), &out); err != nil {
		t.Fatal(err)
	}
	var report replay.Report
	if o.json {
		if err := json.Unmarshal(out.Bytes(), &report); err != nil {
			t.Fatalf("%v in %s", err, &out)
		}
	}
	return report, out.String()
}

// ignoreCleaner ignores the goroutines that close idle connections, which end within timeouts.keepalive_idle after the
// last connection to a replica.
var ignoreCleaner = goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner")

func TestDemoPrefixImprovesHitRatio(t *testing.T) {
	got, out := testDemo(t, t.Context(), demoOptions{duration: 6 * time.Second, json: true})
	if len(got.Results) != 2 {
		t.Fatalf("got %s", out)
	}
	base, prefix := got.Results[0], got.Results[1]
	if base.Policy != "round-robin" || prefix.Policy != "prefix" || base.Lost+prefix.Lost > 0 {
		t.Errorf("got %s", out)
	}
	if prefix.HitRatio < 1.25*base.HitRatio {
		t.Errorf("hit ratio %.3f behind prefix, %.3f behind round robin", prefix.HitRatio, base.HitRatio)
	}
}

// TestDemoSplitsRequests compares two replicas for prefill and two for decode with four that do both.
func TestDemoSplitsRequests(t *testing.T) {
	got, out := testDemo(t, t.Context(), demoOptions{duration: 6 * time.Second, disaggregation: true, json: true})
	if len(got.Results) != 2 {
		t.Fatalf("got %s", out)
	}
	both, roles := got.Results[0], got.Results[1]
	if both.Policy != "4 both" || roles.Policy != "2 P + 2 D" || both.Lost+roles.Lost > 0 || both.SplitShare != 0 || roles.SplitShare == 0 ||
		both.ITLP99 == 0 || roles.ITLP99 == 0 {
		t.Errorf("got %s", out)
	}
}

func TestDescribeSplits(t *testing.T) {
	got := describeSplits(replay.Summary{ITLP99: 0.25}, replay.Summary{Requests: 200, SplitShare: 0.42, ITLP99: 0.02})
	if want := "Split: 84 of 200 requests. " +
		"99 % of the gaps between tokens are below 20 ms, and below 250 ms on replicas that do both."; got != want {
		t.Errorf("got %s", got)
	}
}

func TestSavedPrefill(t *testing.T) {
	for _, c := range []struct {
		base, ours prefill
		want       string
	}{
		{prefill{100_000, 80_000}, prefill{200_000, 60_000},
			"Saved against round robin: 62 % of the prefill, 100000 prompt tokens or 2.3 s of a replica."},
		{prefill{}, prefill{}, "Saved: no prompt was computed."},
		{prefill{1000, 1000}, prefill{1000, 0}, "Saved against round robin: 100 % of the prefill, 1000 prompt tokens or 0.0 s of a replica."},
	} {
		if got := savedPrefill(c.base, c.ours); got != c.want {
			t.Errorf("%v and %v: %s", c.base, c.ours, got)
		}
	}
}

func TestDemoInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(500*time.Millisecond, cancel)
	_, out := testDemo(t, ctx, demoOptions{})
	if !bytes.Contains([]byte(out), []byte("TTFT ms")) {
		t.Errorf("no table in %s", out)
	}
	if !strings.Contains(out, "Live page: http://127.0.0.1:") {
		t.Errorf("no live page in %s", out)
	}
}

func TestDemoInvalidPort(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), ignoreCleaner)
	err := runDemo(t.Context(), demoOptions{backends: 1, listen: "127.0.0.1:99999", page: "127.0.0.1:0"}, testConfigs(), io.Discard)
	if err == nil {
		t.Error("no error")
	}
}

func demoSummaries() []replay.Summary {
	return []replay.Summary{
		{Policy: "round-robin", Requests: 10, HitRatio: 0.4, TTFTMean: 0.3, TTFTP50: 0.2, TTFTP99: 1, E2EMean: 1},
		{Policy: "prefix", Requests: 12, HitRatio: 0.8, TTFTMean: 0.1, TTFTP50: 0.1, TTFTP99: 0.5, E2EMean: 0.7},
	}
}

func TestDemoScreenComparison(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.showFinal(20*time.Second, demoSummaries())
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

func TestTerminalStyle(t *testing.T) {
	f := func(color, blocks bool, variables ...string) {
		t.Helper()
		for i, name := range []string{"TERM", "NO_COLOR", "LANG"} {
			t.Setenv(name, variables[i])
		}
		t.Setenv("LC_ALL", "")
		t.Setenv("LC_CTYPE", "")
		if got := terminalStyle(); got != (barStyle{color, blocks}) {
			t.Errorf("%q: %+v", variables, got)
		}
	}
	f(true, true, "xterm", "", "de_DE.UTF-8")
	f(false, true, "xterm", "1", "C.UTF-8")
	f(false, false, "dumb", "", "C")
	f(false, false, "", "", "")
}

func TestDemoScreenWithoutTerminal(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.update(5*time.Second, demoSummaries())
	s.update(10*time.Second, demoSummaries())
	if got := out.String(); strings.Count(got, "\n") != 2 || strings.Contains(got, "\x1b") {
		t.Errorf("got %q, want two lines without escapes", got)
	}
}

func TestDemoScreenReplacesFrame(t *testing.T) {
	var out bytes.Buffer
	s := newDemoScreen(&out)
	s.terminal = true
	t.Setenv("TERM", "xterm")
	s.update(0, []replay.Summary{{Policy: "round-robin"}, {Policy: "prefix"}})
	first := strings.Count(out.String(), "\n")
	out.Reset()
	s.update(time.Second, demoSummaries())
	if got, want := out.String(), fmt.Sprintf("\x1b[%dA\x1b[J", first); !strings.Contains(got, want) {
		t.Errorf("got %q, want %q in it", got, want)
	}
}
