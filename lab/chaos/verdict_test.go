package main

import (
	"testing"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

func TestVerdict(t *testing.T) {
	known := &prompt{known: true, output: "one two three", tokens: 3}
	complete := loadgen.Response{Result: replay.Result{Sent: time.Now()}, Status: 200, Committed: true, Finish: "length", Usage: true,
		Output: known.output, Backend: "r0"}
	complete.CompletionTokens = 3
	with := func(change func(*loadgen.Response)) loadgen.Response {
		r := complete
		change(&r)
		return r
	}
	f := func(what string, allowed func(bool, loadgen.Response) bool, streams bool, r loadgen.Response, violations int) {
		t.Helper()
		v := newVerdict(allowed)
		v.checkAndCount(known, streams, r)
		if v.violationCount != violations || v.sent != 1 || (v.completed == 1) != (r.Err == "") {
			t.Errorf("%s: %d violations, want %d; %v", what, v.violationCount, violations, v.violations)
		}
	}
	failed := func(cause, output string, committed bool, status int) loadgen.Response {
		return loadgen.Response{Result: replay.Result{Err: cause}, Output: output, Committed: committed, Status: status}
	}
	f("complete output", nil, true, complete, 0)
	f("other output", nil, true, with(func(r *loadgen.Response) { r.Output = "four" }), 2)
	f("gap", nil, true, with(func(r *loadgen.Response) { r.Output = "one three" }), 2)
	f("missing end", nil, true, with(func(r *loadgen.Response) { r.Output = "one" }), 1)
	f("no usage", nil, false, with(func(r *loadgen.Response) { r.Usage = false }), 1)
	f("one token too few", nil, false, with(func(r *loadgen.Response) { r.CompletionTokens = 2 }), 1)

	const event, abort, cut = loadgen.StreamError, loadgen.ResponseAborted, loadgen.StreamTruncated
	f("stream error", endedWithErrorEvent, true, failed(event, "one", true, 200), 0)
	f("stream error, not allowed", nil, true, failed(event, "one", true, 200), 1)
	f("stream error before commit", endedWithErrorEvent, true, failed(event, "", false, 200), 1)
	f("stream error with a gap", endedWithErrorEvent, true, failed(event, "one three", true, 200), 1)
	f("truncated stream", endedWithErrorEvent, true, failed(cut, "one", true, 200), 1)
	f("aborted stream without error event", endedWithErrorEvent, true, failed(abort, "one", true, 200), 1)
	f("aborted buffered response", endedWithErrorEvent, false, failed(abort, "one", true, 200), 1)
	f("allowed status", allowStatuses(503), false, failed("status 503", "", false, 503), 0)
	f("other status", allowStatuses(503), false, failed("status 502", "", false, 502), 1)
	f("lost connection", allowStatuses(503), false, failed(loadgen.NoConnection, "", false, 0), 1)

	v := newVerdict(nil)
	v.checkAndCount(&prompt{tokens: 3}, false, complete)
	v.require(true, "never said")
	if v.violationCount != 0 || v.lastRespondedSentAt("r0") != complete.Sent || v.lastFirstToken("r0").Before(complete.Sent) ||
		v.responseCount() != 1 || v.sent != 1 {
		t.Errorf("an output that is not known beforehand: %+v", v)
	}
}

func TestNamed(t *testing.T) {
	if all, unknown := chooseScenarios(scenarios, nil, false); len(all) != len(scenarios) || unknown != nil {
		t.Errorf("%d scenarios, unknown %v", len(all), unknown)
	}
	chosen, unknown := chooseScenarios(scenarios, []string{"outage", "kill", "nonsense"}, true)
	if len(chosen) != 1 || chosen[0].name != "kill" || len(unknown) != 2 {
		t.Errorf("chosen %d, unknown %v; an outage is not for real replicas", len(chosen), unknown)
	}
}

// TestRecordedPrompts checks that outputs differ, so that one which went to the wrong
// client is noticed.
func TestRecordedPrompts(t *testing.T) {
	prompts, err := recordSimulatedPrompts(t.Context(), 40)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, q := range prompts {
		if !q.known || len(q.output) < 40 || seen[q.output[:40]] {
			t.Errorf("output %.60q: too short, or not unique", q.output)
		}
		seen[q.output[:40]] = true
	}
}
