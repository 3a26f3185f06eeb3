package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

// maxListedViolations is how many violations of a scenario are printed.
const maxListedViolations = 5

// verdict counts the responses and violations of one scenario. Safe for concurrent use.
type verdict struct {
	allowed func(streams bool, r loadgen.Response) bool // failures that the scenario may cause

	mu             sync.Mutex
	sent           int
	completed      int
	failed         map[string]int       // by cause
	violationCount int                  // failed requirements and failures that are not allowed
	violations     []string             // the first of them
	served         map[string]time.Time // by backend, the last first token of a complete response
	sentTo         map[string]time.Time // by backend, when its last completed request was sent
	measurements   []string             // lines for the report

	measuredFrom       time.Time     // requests sent before are not in the tallies
	measuredStreams    *replay.Tally // nil: nothing is measured
	measuredOfAllKinds *replay.Tally
}

func newVerdict(allowed func(streams bool, r loadgen.Response) bool) *verdict {
	return &verdict{allowed: allowed, failed: map[string]int{}, served: map[string]time.Time{}, sentTo: map[string]time.Time{}}
}

// checkAndCount checks and counts the response to a prompt.
func (v *verdict) checkAndCount(q *prompt, streams bool, r loadgen.Response) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.measuredStreams != nil && r.Err == "" && !r.Sent.Before(v.measuredFrom) {
		v.measuredOfAllKinds.Add(r.Result)
		if streams {
			v.measuredStreams.Add(r.Result)
		}
	}
	v.checkAndCountLocked(q, streams, r)
}

// checkAndCountUnmeasured is checkAndCount for a request that is not one of the clients'.
func (v *verdict) checkAndCountUnmeasured(q *prompt, r loadgen.Response) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.checkAndCountLocked(q, false, r)
}

// startMeasuring starts new tallies of the clients' streams and of all their requests that are
// sent from now on.
func (v *verdict) startMeasuring() (streams, all *replay.Tally) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.measuredFrom, v.measuredStreams, v.measuredOfAllKinds = time.Now(), new(replay.Tally), new(replay.Tally)
	return v.measuredStreams, v.measuredOfAllKinds
}

// addMeasurement adds a line of measurements to the report.
func (v *verdict) addMeasurement(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.measurements = append(v.measurements, fmt.Sprintf(format, args...))
}

// checkAndCountLocked requires mu.
func (v *verdict) checkAndCountLocked(q *prompt, streams bool, r loadgen.Response) {
	v.sent++
	// The text received must be a prefix of the output: no gap, no other output.
	if q.known && !strings.HasPrefix(q.output, r.Output) {
		v.addViolationLocked("wrong output from %s: not a prefix of the expected one: %.80q", r.Backend, r.Output)
	}
	if r.Err == "" {
		v.completed++
		if first := r.Sent.Add(r.TTFT); first.After(v.served[r.Backend]) {
			v.served[r.Backend] = first
		}
		if r.Sent.After(v.sentTo[r.Backend]) {
			v.sentTo[r.Backend] = r.Sent
		}
		if q.known && r.Output != q.output || r.Output == "" || r.Finish != "length" || !r.Usage || r.CompletionTokens != q.tokens {
			v.addViolationLocked("incomplete output from %s: %d of %d bytes (0: unknown), finish_reason %q, usage %v with %d of %d tokens",
				r.Backend, len(r.Output), len(q.output), r.Finish, r.Usage, r.CompletionTokens, q.tokens)
		}
		return
	}
	kind := "buffered"
	if streams {
		kind = "stream"
	}
	if !r.Committed {
		kind += ", not committed"
	}
	v.failed[r.Err+" ("+kind+")"]++
	if v.allowed == nil || !v.allowed(streams, r) {
		v.addViolationLocked("%s (%s) from %q after %v: %s", r.Err, kind, r.Backend, time.Since(r.Sent).Round(time.Millisecond),
			strings.TrimSpace(r.Detail))
	}
}

// require adds a violation unless ok.
func (v *verdict) require(ok bool, format string, args ...any) {
	if ok {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.addViolationLocked(format, args...)
}

// addViolationLocked adds a violation. It requires mu.
func (v *verdict) addViolationLocked(format string, args ...any) {
	if v.violationCount++; v.violationCount <= maxListedViolations {
		v.violations = append(v.violations, fmt.Sprintf(format, args...))
	}
}

// responseCount returns how many complete responses were received.
func (v *verdict) responseCount() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.completed
}

// lastFirstToken returns the time of the last first token of a complete response.
func (v *verdict) lastFirstToken(backend string) time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.served[backend]
}

// lastRespondedSentAt returns when the last request with a complete response was sent.
func (v *verdict) lastRespondedSentAt(backend string) time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sentTo[backend]
}

// The allowed failures of the failure table (lab/docs/internals.md).

// endedWithErrorEvent reports whether a committed stream ended with an error event, as it
// must when its replica crashed or aborted it.
func endedWithErrorEvent(streams bool, r loadgen.Response) bool {
	return streams && r.Committed && r.Err == loadgen.StreamError
}

// allowStatuses returns a predicate that allows failures with the given statuses.
func allowStatuses(codes ...int) (allowed func(streams bool, r loadgen.Response) bool) {
	return func(_ bool, r loadgen.Response) bool {
		for _, code := range codes {
			if r.Status == code && r.Err == fmt.Sprint("status ", code) {
				return true
			}
		}
		return false
	}
}
