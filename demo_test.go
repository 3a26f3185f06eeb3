package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/replay"
)

// verifyNoGoroutineLeft overlooks fasthttp's cleaner of idle connections: it
// ends by itself, seconds after the last connection was closed.
func verifyNoGoroutineLeft(t *testing.T, before goleak.Option) {
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"))
}

func testDemo(t *testing.T, ctx context.Context, o demoOptions) (replay.Report, string) {
	t.Helper()
	defer verifyNoGoroutineLeft(t, goleak.IgnoreCurrent())
	o.backends = 4
	o.listen, o.admin = "127.0.0.1:0", "127.0.0.1:0"
	var out bytes.Buffer
	if err := runDemo(ctx, o, &out); err != nil {
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

func TestDemoShowsTheGain(t *testing.T) {
	got, out := testDemo(t, t.Context(), demoOptions{length: 6 * time.Second, json: true})
	if len(got.Results) != 2 {
		t.Fatalf("got %s", out)
	}
	base, ours := got.Results[0], got.Results[1]
	if base.Policy != "round-robin" || ours.Policy != "prefix" || base.Lost+ours.Lost > 0 {
		t.Errorf("got %s", out)
	}
	if ours.HitRatio < 1.25*base.HitRatio {
		t.Errorf("hit ratio %.3f behind prefix, %.3f behind round robin", ours.HitRatio, base.HitRatio)
	}
}

func TestDemoEndsWhenInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(500*time.Millisecond, cancel)
	_, out := testDemo(t, ctx, demoOptions{})
	if !bytes.Contains([]byte(out), []byte("TTFT ms")) {
		t.Errorf("no table in %s", out)
	}
	if !strings.Contains(out, "Live page and metrics: http://127.0.0.1:") {
		t.Errorf("no page in %s", out)
	}
}

func TestDemoSaysWhichPortIsTaken(t *testing.T) {
	defer verifyNoGoroutineLeft(t, goleak.IgnoreCurrent())
	err := runDemo(t.Context(), demoOptions{backends: 1, listen: "127.0.0.1:99999"}, io.Discard)
	if err == nil {
		t.Error("no error")
	}
}
