package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"warmroute/loadgen"
	"warmroute/replay"
)

// maxListedViolations bounds how many of a scenario's are told one by one.
const maxListedViolations = 5

// verdict counts what became of the requests of one scenario. Safe for
// concurrent use.
type verdict struct {
	allowed func(streams bool, r loadgen.Response) bool // failures that the failure table allows here

	mu             sync.Mutex
	sent           int
	answered       int
	failed         map[string]int       // by cause
	violationCount int                  // requirements that were not met, and requests lost against the rules
	violations     []string             // the first of them, for people
	served         map[string]time.Time // by backend, when it last began an answer that then came whole
	sentTo         map[string]time.Time // and when the last request came that it answered
	measurements   []string             // of what was measured, for people

	measuredFrom       time.Time     // what was sent before is not in the following two
	measuredStreams    *replay.Tally // nil: nothing is measured
	measuredOfAllKinds *replay.Tally
}

func newVerdict(allowed func(bool, loadgen.Response) bool) *verdict {
	return &verdict{allowed: allowed, failed: map[string]int{}, served: map[string]time.Time{}, sentTo: map[string]time.Time{}}
}

// addResponse takes in what became of a question.
func (v *verdict) addResponse(q *prompt, streams bool, r loadgen.Response) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.measuredStreams != nil && r.Err == "" && !r.Sent.Before(v.measuredFrom) {
		v.measuredOfAllKinds.Add(r.Result)
		if streams {
			v.measuredStreams.Add(r.Result)
		}
	}
	v.addLocked(q, streams, r)
}

// addUnmeasuredResponse takes in what became of a question that is not the clients', and so
// is not measured.
func (v *verdict) addUnmeasuredResponse(q *prompt, r loadgen.Response) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.addLocked(q, false, r)
}

// measure begins to add up what clients see of the requests that they send from now
// on, of streams and of all, in place of what it added up before.
func (v *verdict) measure() (streams, all *replay.Tally) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.measuredFrom, v.measuredStreams, v.measuredOfAllKinds = time.Now(), new(replay.Tally), new(replay.Tally)
	return v.measuredStreams, v.measuredOfAllKinds
}

// record adds a line of measurements to the report.
func (v *verdict) record(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.measurements = append(v.measurements, fmt.Sprintf(format, args...))
}

func (v *verdict) addLocked(q *prompt, streams bool, r loadgen.Response) {
	v.sent++
	// Whatever came must be the beginning of the answer, without a hole and
	// without anybody else's words.
	if q.known && !strings.HasPrefix(q.answer, r.Answer) {
		v.addViolation("wrong answer from %s, which is not how the right one begins: %.80q", r.Backend, r.Answer)
	}
	if r.Err == "" {
		v.answered++
		if first := r.Sent.Add(r.TTFT); first.After(v.served[r.Backend]) {
			v.served[r.Backend] = first
		}
		if r.Sent.After(v.sentTo[r.Backend]) {
			v.sentTo[r.Backend] = r.Sent
		}
		if q.known && r.Answer != q.answer || r.Answer == "" || r.Finish != "length" || !r.Usage || r.CompletionTokens != q.tokens {
			v.addViolation("an answer from %s that is not whole: %d bytes of %d (0: not known), finish_reason %q, usage %v with %d of %d tokens",
				r.Backend, len(r.Answer), len(q.answer), r.Finish, r.Usage, r.CompletionTokens, q.tokens)
		}
		return
	}
	kind := "whole"
	if streams {
		kind = "stream"
	}
	if !r.Committed {
		kind += ", not committed"
	}
	v.failed[r.Err+" ("+kind+")"]++
	if v.allowed == nil || !v.allowed(streams, r) {
		v.addViolation("%s (%s) from %q after %v: %s", r.Err, kind, r.Backend, time.Since(r.Sent).Round(time.Millisecond), strings.TrimSpace(r.Detail))
	}
}

// require notes a violation that is no request's.
func (v *verdict) require(ok bool, format string, args ...any) {
	if ok {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.addViolation(format, args...)
}

// addViolation wants mu held.
func (v *verdict) addViolation(format string, args ...any) {
	if v.violationCount++; v.violationCount <= maxListedViolations {
		v.violations = append(v.violations, fmt.Sprintf(format, args...))
	}
}

// answerCount is how many came whole so far.
func (v *verdict) answerCount() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.answered
}

// requestCount is how many have ended so far.
func (v *verdict) requestCount() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sent
}

func (v *verdict) lastServed(backend string) time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.served[backend]
}

func (v *verdict) lastSent(backend string) time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sentTo[backend]
}

// The failures of the failure table (docs/architecture.md, "Attempts").

// endedWithErrorEvent is a stream that its client had seen begin when its replica died, or
// aborted it: an error event, and never silence.
func endedWithErrorEvent(streams bool, r loadgen.Response) bool {
	return streams && r.Committed && r.Err == loadgen.StreamError
}

// status is an answer that the replicas themselves gave, or the proxy for want of any.
func status(codes ...int) func(bool, loadgen.Response) bool {
	return func(_ bool, r loadgen.Response) bool {
		for _, code := range codes {
			if r.Status == code && r.Err == fmt.Sprint("status ", code) {
				return true
			}
		}
		return false
	}
}
