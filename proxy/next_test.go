package proxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/proxy/fault"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// Backends of the tables below.
var (
	backendA = &backends.Backend{Name: "a"}
	backendB = &backends.Backend{Name: "b"}
	backendC = &backends.Backend{Name: "c"}
)

// states makes a view of backends a, b and c: d down, r ready.
func states(of string) (f fleetView) {
	for i, b := range []*backends.Backend{backendA, backendB, backendC}[:len(of)] {
		state := backends.Ready
		if of[i] == 'd' {
			state = backends.Down
		}
		f = append(f, backendView{backend: b, state: state, candidate: true, decodes: b != backendA})
	}
	return f
}

// Failures of the tables below.
var (
	connectionRefused = fault.Failure{Reason: "connect", Err: errors.New("refused"), IsFree: true}
	crash             = fault.Failure{Reason: "truncated", Err: fault.ErrTruncated, SuspectsCrash: true}
	fullFailure       = fault.Failure{Reason: "status_503", Status: 503, QueueFull: true}
	prefillFull       = fault.Failure{Reason: "status_503", Err: errors.New("status 503"), IsFree: true, QueueFull: true}
	staleConnection   = fault.Failure{Reason: "stale_connection"}
	shutdownStatus    = fault.Failure{Reason: "status_500", Status: 500, IsFree: true, ShuttingDown: true}
	abortFailure      = fault.Failure{Reason: "aborted", Status: 503, ShuttingDown: true}
	serverError       = fault.Failure{Reason: "status_500", Status: 500, SuspectsCrash: true}
	redirect          = fault.Failure{Reason: "redirect"}
	endpointMissing   = fault.Failure{Reason: "endpoint_missing", Status: 404, IsFree: true}
	lastTimeout       = fault.Failure{Reason: "first_byte_timeout", NoRetry: true}
	prefillFailed     = fault.Failure{Reason: "status_500", Err: errors.New("status 500"), IsFree: true, SuspectsCrash: true}
	transferFailed    = fault.Failure{Reason: "status_500", Status: 500, IsFree: true, SameBackend: true}
)

func TestNext(t *testing.T) {
	start := time.Now()
	type try struct {
		b *backends.Backend
		f fault.Failure
	}
	wait := func(kind waitKind, timeout time.Duration) action {
		return action{kind: actWait, wait: kind, deadline: start.Add(timeout)}
	}
	pick, pickDecode := action{kind: actPick}, action{kind: actPick, decode: true}
	prefilled := func(notAfter time.Duration) func(*history, *Settings) {
		return func(h *history, _ *Settings) { h.kvTransfer = &upstream.KVTransfer{NotAfter: start.Add(notAfter)} }
	}
	answer := func(r responseKind) action { return action{kind: actRespond, response: r} }
	for _, c := range []struct {
		name   string
		tries  []try
		fleet  string
		change func(*history, *Settings)
		want   action
	}{
		{"first pick", nil, "", nil, pick},
		{"router has no backend", nil, "dd", notPicked(router.ErrNoneReady), answer(respondNotPicked)},
		{"client disconnect", nil, "", func(h *history, _ *Settings) { h.end = disconnected }, answer(respondDisconnected)},
		{"cancelled", []try{{backendA, redirect}}, "rr", func(h *history, _ *Settings) { h.end = endedByProxy }, answer(respondProxyEnd)},

		{"connection refused, another ready", []try{{backendA, connectionRefused}}, "rr", nil, pick},
		{"all connections refused", []try{{backendA, connectionRefused}, {backendB, connectionRefused}}, "rr", nil,
			wait(waitReconnect, minReconnectDelay)},
		{"second wait to reconnect", []try{{backendA, connectionRefused}}, "r", func(h *history, _ *Settings) {
			h.reconnectDelay = minReconnectDelay
		}, wait(waitReconnect, 2*minReconnectDelay)},
		{"reconnects have an end", []try{{backendA, connectionRefused}}, "r", func(h *history, _ *Settings) {
			h.receivedAt = start.Add(-time.Minute)
		}, answer(respondNotPicked)},
		{"no queue, no reconnect", []try{{backendA, connectionRefused}}, "r", func(h *history, _ *Settings) {
			h.queueTimeouts = router.QueueTimeouts{}
		}, answer(respondFailure)},

		{"failed attempt", []try{{backendA, redirect}}, "rr", nil, wait(waitBudget, time.Minute)},
		{"failed attempt, no queue", []try{{backendA, redirect}}, "rr", func(h *history, _ *Settings) {
			h.queueTimeouts = router.QueueTimeouts{}
		}, wait(waitBudget, 0)},
		{"failed attempt, no other backend", []try{{backendA, redirect}}, "r", nil, pick},
		{"budget granted", []try{{backendA, redirect}}, "rr", waited(waitBudget, waitMet), pick},
		{"no budget in time", []try{{backendA, redirect}}, "rr", waited(waitBudget, waitExpired), answer(respondFailure)},
		{"retries disabled", []try{{backendA, redirect}}, "rr", func(_ *history, s *Settings) {
			s.Retry.Share, s.Retry.PerSecond = 0, 0
		}, answer(respondFailure)},
		{"limit of attempts", []try{{backendA, redirect}, {backendB, redirect}, {backendC, redirect}}, "rrr", nil, answer(respondFailure)},
		{"timeout that is not retried", []try{{backendA, lastTimeout}}, "rr", nil, answer(respondFailure)},
		{"budget wait after an error of a replica", []try{{backendA, serverError}}, "rr", nil, wait(waitBudget, upstreamErrorRetryTimeout)},

		{"crash, another ready", []try{{backendA, crash}}, "rr", nil, wait(waitBudget, time.Minute)},
		{"crash of the only one", []try{{backendA, crash}}, "r", nil, wait(waitVerdict, healthRecheckTimeout)},
		{"error of the only one", []try{{backendA, serverError}}, "r", nil, wait(waitVerdict, shutdownVerdictTimeout)},
		{"two crashes", []try{{backendA, crash}, {backendB, crash}}, "rrr", nil, wait(waitCrashes, healthRecheckTimeout)},
		{"two crashes, both down", []try{{backendA, crash}, {backendB, crash}}, "ddr", waited(waitCrashes, waitExpired),
			action{kind: actRespond, poison: true}},
		{"two crashes, the first is back", []try{{backendA, crash}, {backendB, crash}}, "rdr", waited(waitCrashes, waitExpired),
			wait(waitBudget, time.Minute)},
		{"two crashes, nobody at risk", []try{{backendA, crash}, {backendB, crash}}, "ddd", waited(waitCrashes, waitExpired),
			wait(waitVerdict, healthRecheckTimeout)},
		{"refused connection to a replica that may have crashed",
			[]try{{backendA, crash}, {backendB, fault.Failure{IsFree: true, SuspectsCrash: true}}}, "rrr", nil,
			wait(waitCrashes, healthRecheckTimeout)},

		{"shutdown is not charged", []try{{backendA, shutdownStatus}}, "rr", nil, pick},
		{"abort, another ready", []try{{backendA, abortFailure}}, "rr", nil, wait(waitBudget, time.Minute)},
		{"abort of the only one", []try{{backendA, abortFailure}}, "r", nil, wait(waitVerdict, shutdownVerdictTimeout)},
		{"abort of one that stays", []try{{backendA, abortFailure}}, "r", waited(waitVerdict, waitExpired), pick},
		{"aborts have their limit", []try{{backendA, abortFailure}, {backendB, abortFailure}, {backendC, abortFailure}}, "rrr", nil,
			answer(respondReplicaError)},

		{"stale connection", []try{{backendA, staleConnection}}, "r", nil, wait(waitBudget, time.Minute)},
		{"only stale connections", []try{{backendA, staleConnection}, {backendB, staleConnection}, {backendA, staleConnection}}, "rr", nil,
			wait(waitAllDown, healthRecheckTimeout)},
		{"all found down", []try{{backendA, crash}, {backendB, staleConnection}, {backendB, crash}}, "dd", waited(waitAllDown, waitMet), pick},
		{"not all down", []try{{backendA, crash}, {backendB, staleConnection}, {backendB, crash}}, "dr", waited(waitAllDown, waitExpired),
			answer(respondFailure)},

		{"endpoint missing", []try{{backendA, endpointMissing}}, "rr", nil, pick},
		{"endpoint missing, however often", []try{{backendA, endpointMissing}, {backendB, endpointMissing}, {backendC, endpointMissing}}, "rrr",
			nil, pick},
		{"endpoint missing without retries", []try{{backendA, endpointMissing}}, "rr", func(_ *history, s *Settings) {
			s.Retry.Share, s.Retry.PerSecond = 0, 0
		}, pick},
		{"endpoint missing everywhere", []try{{backendA, endpointMissing}}, "r", notPicked(router.ErrEndpointMissing),
			answer(respondReplicaError)},
		{"endpoint missing, as all say of this request", []try{{backendA, endpointMissing}, {backendB, endpointMissing}}, "rr",
			notPicked(router.ErrNoneReady), answer(respondReplicaError)},
		{"endpoint missing where one is ready", []try{{backendA, endpointMissing}}, "rd", notPicked(router.ErrNoneReady),
			answer(respondNotPicked)},
		{"endpoint known to be missing", nil, "r", notPicked(router.ErrEndpointMissing), answer(respondNotPicked)},
		{"endpoint missing, then connection refused", []try{{backendA, endpointMissing}, {backendB, connectionRefused}}, "rr", nil,
			wait(waitReconnect, minReconnectDelay)},
		{"endpoint missing, then full", []try{{backendA, endpointMissing}, {backendB, fullFailure}}, "rr", nil, pick},
		{"endpoint missing, then the error of another", []try{{backendA, endpointMissing}, {backendB, fullFailure}}, "rr",
			notPicked(router.ErrNoneReady), answer(respondReplicaError)},
		{"endpoint missing after a failure", []try{{backendA, redirect}, {backendB, endpointMissing}}, "rr", notPicked(router.ErrNoneReady),
			answer(respondFailure)},

		{"prefill request failed", []try{{backendA, prefillFailed}}, "rr", nil, pick},
		{"prefill request failed without retries", []try{{backendA, prefillFailed}}, "rr", func(_ *history, s *Settings) {
			s.Attempts, s.Retry.Share, s.Retry.PerSecond = 1, 0, 0
		}, pick},
		{"prefill request failed, no decode", []try{{backendA, prefillFailed}}, "rd", nil, wait(waitReconnect, minReconnectDelay)},
		{"prefill request failed, then the decode crashed", []try{{backendA, prefillFailed}, {backendB, crash}}, "rrr", nil,
			wait(waitCrashes, healthRecheckTimeout)},
		{"prefill request failed, no backend", []try{{backendA, prefillFailed}}, "dd", notPicked(router.ErrBusy), answer(respondNotPicked)},
		{"transfer failed", []try{{backendB, transferFailed}}, "rr", nil, pick},
		{"transfer failed, the only one", []try{{backendA, transferFailed}}, "r", nil, pick},
		{"transfer failed without retries", []try{{backendB, transferFailed}}, "rr", func(_ *history, s *Settings) {
			s.Attempts, s.Retry.Share, s.Retry.PerSecond = 1, 0, 0
		}, pick},
		{"decode refused", []try{{backendB, connectionRefused}}, "rrr", prefilled(time.Second), pickDecode},
		{"decode refused, too late", []try{{backendB, connectionRefused}}, "rrr", prefilled(-time.Second), pick},
		{"decode refused, no other for it", []try{{backendB, connectionRefused}}, "rr", prefilled(time.Second), pick},
		{"decode refused, the other is down", []try{{backendB, connectionRefused}}, "rrd", prefilled(time.Second), pick},
		{"decode refused, all others too", []try{{backendA, connectionRefused}, {backendB, connectionRefused}}, "rr", prefilled(time.Second),
			wait(waitReconnect, minReconnectDelay)},
		{"no backend for the decode", []try{{backendB, connectionRefused}}, "rr", func(h *history, s *Settings) {
			prefilled(time.Second)(h, s)
			notPicked(router.ErrNoneReady)(h, s)
		}, pick},
		{"no backend at all", []try{{backendB, connectionRefused}}, "dd", func(h *history, s *Settings) {
			prefilled(time.Second)(h, s)
			notPicked(router.ErrNoneReady)(h, s)
		}, wait(waitReconnect, minReconnectDelay)},
		{"disconnect between prefill and decode", nil, "rr", func(h *history, s *Settings) {
			prefilled(time.Second)(h, s)
			h.end = disconnected
		}, answer(respondDisconnected)},

		{"one full", []try{{backendA, fullFailure}}, "rr", nil, pick},
		{"all full", []try{{backendA, fullFailure}, {backendB, fullFailure}}, "rr", nil, pick},
		{"full beyond the limit of attempts", []try{{backendA, redirect}, {backendB, redirect}, {backendC, fullFailure}}, "rrr", nil, pick},
		{"full, then a failure", []try{{backendA, fullFailure}, {backendB, redirect}}, "rr", nil, wait(waitBudget, time.Minute)},
		{"full twice", []try{{backendA, fullFailure}, {backendA, fullFailure}}, "r", nil, wait(waitBackoff, time.Minute)},
		{"full twice, waited", []try{{backendA, fullFailure}, {backendA, fullFailure}}, "r", waited(waitBackoff, waitMet), pick},
		{"full until the limit of the queue", []try{{backendA, fullFailure}, {backendA, fullFailure}}, "r", waited(waitBackoff, waitExpired),
			answer(respondReplicaError)},
		{"full until the limit of the queue, prefill request", []try{{backendA, prefillFull}, {backendA, prefillFull}}, "r",
			func(h *history, s *Settings) {
				waited(waitBackoff, waitExpired)(h, s)
				h.waited.Busy = time.Minute
			}, answer(respondNotPicked)},
		{"full, not in time", []try{{backendA, fullFailure}}, "r", notPicked(router.ErrBusy), answer(respondReplicaError)},
		{"full, queue full", []try{{backendA, fullFailure}}, "r", notPicked(router.ErrQueueFull), answer(respondReplicaError)},
		{"one full, not queued", []try{{backendA, fullFailure}}, "rr", nil, wait(waitBudget, upstreamErrorRetryTimeout)},
		{"all full, not queued", []try{{backendA, fullFailure}, {backendB, fullFailure}}, "rr", nil, pick},
	} {
		h := &history{receivedAt: start, queueTimeouts: router.QueueTimeouts{Total: time.Minute},
			queuesIfFull: !strings.HasSuffix(c.name, "not queued")}
		s := &Settings{Attempts: 3, Retry: RetrySettings{Share: 0.2, PerSecond: 10}}
		f := states(c.fleet)
		for _, try := range c.tries {
			failed := try.f
			h.addFailure(try.b, &failed, start)
			if h.isBetterFailure(&failed) {
				h.best = &failed
			}
		}
		if c.change != nil {
			c.change(h, s)
		}
		if h.last == stepWait { // what it was for has readmitted backends
			h.recordWaitAndReadmit(&action{wait: h.wait}, h.outcome, f)
		}
		before := len(h.attempts)
		got := nextAction(h, f, s, start)
		if got.kind != c.want.kind || got.wait != c.want.wait || !got.deadline.Equal(c.want.deadline) ||
			got.response != c.want.response || got.poison != c.want.poison || got.decode != c.want.decode {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
		if len(h.attempts) != before {
			t.Errorf("%s: next has changed the history", c.name)
		}
	}
}

// notPicked makes a pick that failed the last step.
func notPicked(err error) func(*history, *Settings) {
	return func(h *history, _ *Settings) { h.last, h.pickErr = stepPick, err }
}

// waited makes a wait the last step.
func waited(kind waitKind, outcome waitOutcome) func(*history, *Settings) {
	return func(h *history, _ *Settings) { h.last, h.wait, h.outcome = stepWait, kind, outcome }
}

// TestRefusalBackoff expects that a request which the same replica refuses repeatedly waits twice as long each time, and
// that the refusals of a replica are one record.
func TestRefusalBackoff(t *testing.T) {
	begun := time.Now()
	h := &history{queueTimeouts: router.QueueTimeouts{Total: time.Hour}, queuesIfFull: true}
	s := &Settings{Attempts: 3, Retry: RetrySettings{Share: 0.2}}
	full := fullFailure
	for i, want := range []time.Duration{0, minRefusedDelay, 2 * minRefusedDelay, 4 * minRefusedDelay, maxRefusedDelay, maxRefusedDelay} {
		h.addFailure(backendB, &full, begun)
		h.addFailure(backendA, &full, begun)
		a := nextAction(h, states("rr"), s, begun)
		if a.backoff != want || (a.kind == actPick) != (want == 0) {
			t.Errorf("refusal %d: got %+v, want to wait for %v", i+1, a, want)
		}
		if want > 0 && (a.isMet(nil, begun, begun.Add(want-1)) || !a.isMet(nil, begun, begun.Add(want))) {
			t.Errorf("refusal %d: the wait does not end after %v", i+1, want)
		}
	}
	if len(h.attempts) != 2 {
		t.Errorf("%d records of the refusals of 2 replicas", len(h.attempts))
	}
}
