package main

import (
	"testing"
	"time"

	"warmroute/loadgen"
	"warmroute/replay"
)

func TestVerdict(t *testing.T) {
	known := &prompt{known: true, answer: "one two three", tokens: 3}
	whole := loadgen.Response{Result: replay.Result{Sent: time.Now()}, Status: 200, Committed: true, Finish: "length", Usage: true, Answer: known.answer, Backend: "r0"}
	whole.CompletionTokens = 3
	with := func(change func(*loadgen.Response)) loadgen.Response {
		r := whole
		change(&r)
		return r
	}
	f := func(what string, allowed func(bool, loadgen.Response) bool, streams bool, r loadgen.Response, violations int) {
		t.Helper()
		v := newVerdict(allowed)
		v.addResponse(known, streams, r)
		if v.violationCount != violations || v.sent != 1 || (v.answered == 1) != (r.Err == "") {
			t.Errorf("%s: %d violations, want %d; %v", what, v.violationCount, violations, v.violations)
		}
	}
	failed := func(cause, answer string, committed bool, status int) loadgen.Response {
		return loadgen.Response{Result: replay.Result{Err: cause}, Answer: answer, Committed: committed, Status: status}
	}
	f("a whole answer", nil, true, whole, 0)
	f("somebody else's words", nil, true, with(func(r *loadgen.Response) { r.Answer = "four" }), 2)
	f("a hole", nil, true, with(func(r *loadgen.Response) { r.Answer = "one three" }), 2)
	f("an end that is missing", nil, true, with(func(r *loadgen.Response) { r.Answer = "one" }), 1)
	f("no usage", nil, false, with(func(r *loadgen.Response) { r.Usage = false }), 1)
	f("a token too few", nil, false, with(func(r *loadgen.Response) { r.CompletionTokens = 2 }), 1)

	const event, abort, cut = loadgen.StreamError, loadgen.ResponseAborted, loadgen.StreamTruncated
	f("a stream that broke off", endedWithErrorEvent, true, failed(event, "one", true, 200), 0)
	f("… where nothing may", nil, true, failed(event, "one", true, 200), 1)
	f("… before it was committed", endedWithErrorEvent, true, failed(event, "", false, 200), 1)
	f("… with a hole", endedWithErrorEvent, true, failed(event, "one three", true, 200), 1)
	f("… in silence", endedWithErrorEvent, true, failed(cut, "one", true, 200), 1)
	f("a stream that was aborted, and says so itself", endedWithErrorEvent, true, failed(abort, "one", true, 200), 1)
	f("a whole answer that was", endedWithErrorEvent, false, failed(abort, "one", true, 200), 1)
	f("a status that may be", status(503), false, failed("status 503", "", false, 503), 0)
	f("another", status(503), false, failed("status 502", "", false, 502), 1)
	f("a connection lost", status(503), false, failed(loadgen.NoConnection, "", false, 0), 1)

	v := newVerdict(nil)
	v.addResponse(&prompt{tokens: 3}, false, whole)
	v.require(true, "never said")
	if v.violationCount != 0 || v.lastSent("r0") != whole.Sent || v.lastServed("r0").Before(whole.Sent) || v.answerCount() != 1 || v.requestCount() != 1 {
		t.Errorf("an answer that is not known beforehand: %+v", v)
	}
}

func TestNamed(t *testing.T) {
	if all, unknown := named(scenarios, nil, false); len(all) != len(scenarios) || unknown != nil {
		t.Errorf("%d scenarios, unknown %v", len(all), unknown)
	}
	chosen, unknown := named(scenarios, []string{"outage", "kill", "nonsense"}, true)
	if len(chosen) != 1 || chosen[0].name != "kill" || len(unknown) != 2 {
		t.Errorf("chosen %d, unknown %v; an outage is not for real replicas", len(chosen), unknown)
	}
}

// TestQuestionsHaveTheAnswersOfAReplica holds that answers differ, so that one
// that went to the wrong client is seen.
func TestQuestionsHaveTheAnswersOfAReplica(t *testing.T) {
	prompts, err := recordSimulatedPrompts(t.Context(), 40)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, q := range prompts {
		if !q.known || len(q.answer) < 40 || seen[q.answer[:40]] {
			t.Errorf("answer %.60q: too short, or another one's", q.answer)
		}
		seen[q.answer[:40]] = true
	}
}
