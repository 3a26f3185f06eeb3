package health

import (
	"testing"
	"time"
)

// breakerSettings open a breaker after three failures, for a second at first.
var breakerSettings = BreakerSettings{Failures: 3, OpenTime: time.Second}

// breakerTest is a record whose breaker is tested, and the time.
type breakerTest struct {
	*Record
	t        *testing.T
	settings BreakerSettings
	now      time.Time
}

func newBreakerTest(t *testing.T) *breakerTest {
	return &breakerTest{NewRecord(start), t, breakerSettings, start}
}

// send records a request that is sent, a millisecond after what was before.
func (b *breakerTest) send() *Attempt {
	b.now = b.now.Add(time.Millisecond)
	a := &Attempt{SentAt: b.now, Uncached: 64}
	b.RecordSent(a, false, b.now)
	return a
}

func (b *breakerTest) end(a *Attempt, e End) {
	if e.Processed && !e.Failed {
		b.RecordFirstOutput(a, 0, b.now)
	}
	b.RecordEnd(a, e, &b.settings, b.now)
}

// fail makes so many requests fail, one after another.
func (b *breakerTest) fail(times int) {
	for range times {
		b.end(b.send(), End{Failed: true})
	}
}

func (b *breakerTest) expect(when string, state BreakerState, opens uint64) {
	b.t.Helper()
	if got, n := b.Breaker(b.now); got != state || n != opens {
		b.t.Errorf("%s: breaker %v after %d times, want %v after %d", when, got, n, state, opens)
	}
	if due := b.IsProbeDue(b.now); due && state != BreakerHalfOpen {
		b.t.Errorf("%s: a probe is due, although the breaker is %v", when, state)
	}
}

func TestOutcomesThatOpenBreaker(t *testing.T) {
	failed, refused, completed := End{Failed: true}, End{}, End{Processed: true}
	truncated, queueFull := End{Processed: true, Failed: true}, End{Failed: true, QueueFull: true}
	for _, tc := range []struct {
		name     string
		failures int // settings
		ends     []End
		want     BreakerState
	}{
		{"failures", 3, []End{failed, failed, failed}, BreakerOpen},
		{"too few failures", 3, []End{failed, failed}, BreakerClosed},
		{"one is enough", 1, []End{failed}, BreakerOpen},
		{"turned off", 0, []End{failed, failed, failed, failed, failed}, BreakerClosed},
		{"refusals", 3, []End{refused, refused, refused, refused}, BreakerClosed},
		{"a response between", 3, []End{failed, failed, completed, failed, failed}, BreakerClosed},
		{"a refusal between", 3, []End{failed, failed, refused, failed}, BreakerOpen},
		{"truncated responses", 3, []End{truncated, truncated, failed}, BreakerOpen},
		{"a stall, once", 3, []End{{Failed: true, Stalled: true}}, BreakerOpen},
		{"full queues, the engine is not known to work", 3, []End{queueFull, queueFull, failed}, BreakerOpen},
	} {
		b := newBreakerTest(t)
		b.settings.Failures = tc.failures
		for _, e := range tc.ends {
			b.end(b.send(), e)
		}
		if state, _ := b.Breaker(b.now); state != tc.want {
			t.Errorf("%s: breaker %v, want %v", tc.name, state, tc.want)
		}
	}
}

func TestFullQueueOfWorkingEngineIsNoFailure(t *testing.T) {
	b := newBreakerTest(t)
	for range 5 {
		b.RecordFirstOutput(b.send(), 0, b.now)
		b.end(b.send(), End{Failed: true, QueueFull: true})
	}
	b.expect("it works", BreakerClosed, 0)
	b.now = b.now.Add(maxWorkAge)
	for range breakerSettings.Failures {
		b.end(b.send(), End{Failed: true, QueueFull: true})
	}
	b.expect("it has done nothing for a while", BreakerOpen, 1)
}

func TestProbeDelays(t *testing.T) {
	for _, tc := range []struct {
		name string
		open time.Duration
		want []time.Duration
	}{
		{"doubled up to the maximum", time.Second, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second}},
		{"configured beyond the maximum", 10 * time.Second, []time.Duration{10 * time.Second, 10 * time.Second}},
	} {
		b := newBreakerTest(t)
		b.settings.OpenTime = tc.open
		b.fail(3)
		for i, delay := range tc.want {
			opens := uint64(i + 1)
			opened := b.now
			b.now = opened.Add(delay - time.Millisecond)
			b.expect(tc.name+", just before", BreakerOpen, opens)
			b.now = opened.Add(delay)
			if b.expect(tc.name+", due", BreakerHalfOpen, opens); !b.IsProbeDue(b.now) {
				t.Errorf("%s: no probe is due after %v", tc.name, delay)
			}
			probe := b.send()
			if b.expect(tc.name+", probed", BreakerHalfOpen, opens); b.IsProbeDue(b.now) {
				t.Errorf("%s: a second probe is due", tc.name)
			}
			b.end(probe, End{Failed: true})
			b.expect(tc.name+", failed", BreakerOpen, opens+1)
		}
	}
}

func TestOutcomesOfProbe(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  End
		want BreakerState
		due  bool // the next request is a probe
	}{
		{"response", End{Processed: true}, BreakerClosed, false},
		{"refusal, or the client left", End{}, BreakerHalfOpen, true},
		{"failure", End{Failed: true}, BreakerOpen, false},
		{"full queue of a working engine", End{Failed: true, QueueFull: true}, BreakerOpen, false},
	} {
		b := newBreakerTest(t)
		b.fail(3)
		b.now = b.now.Add(time.Second)
		probe := b.send()
		b.work.recordWork(b.now, 0)
		b.end(probe, tc.end)
		if state, _ := b.Breaker(b.now); state != tc.want || b.IsProbeDue(b.now) != tc.due {
			t.Errorf("%s: breaker %v, probe due %v; want %v, %v", tc.name, state, b.IsProbeDue(b.now), tc.want, tc.due)
		}
	}
}

// A full queue does not double the time until the next probe.
func TestProbeDelayAfterFullQueue(t *testing.T) {
	b := newBreakerTest(t)
	b.fail(3)
	for range 5 {
		b.now = b.now.Add(time.Second)
		probe := b.send()
		b.work.recordWork(b.now, 0)
		b.end(probe, End{Failed: true, QueueFull: true})
		b.expect("its queue is full", BreakerOpen, 1)
	}
}

// A burst that failed together must not count against what came after it.
func TestBreakerIgnoresOlderRequests(t *testing.T) {
	b := newBreakerTest(t)
	var before []*Attempt
	for range 10 {
		before = append(before, b.send())
	}
	b.fail(3)
	b.RecordFirstOutput(before[0], 0, b.now)
	b.expect("a response to what was sent before it opened", BreakerOpen, 1)
	b.now = b.now.Add(time.Second)
	b.RecordFirstOutput(b.send(), 0, b.now)
	for _, a := range before {
		b.RecordEnd(a, End{Processed: true, Failed: true}, &b.settings, b.now)
	}
	b.expect("failures of what was sent before it closed", BreakerClosed, 1)
}

// Where there is no other backend, requests are sent in spite of an open breaker.
func TestResponseClosesOpenBreaker(t *testing.T) {
	b := newBreakerTest(t)
	b.fail(3)
	later := b.send()
	b.expect("sent in spite of it", BreakerOpen, 1)
	b.end(later, End{Processed: true})
	b.expect("it works", BreakerClosed, 1)
	b.fail(2)
	b.expect("two more failures", BreakerClosed, 1)
}

func TestBreakerClosesOnProgress(t *testing.T) {
	b := newBreakerTest(t)
	b.fail(3)
	b.now = b.now.Add(time.Second)
	probe := b.send()
	b.breaker.closeOnProgress(&b.settings, probe.SentAt.Add(b.settings.OpenTime-1), b.now)
	b.expect("progress soon after the probe was sent", BreakerHalfOpen, 1)
	b.breaker.closeOnProgress(&b.settings, probe.SentAt.Add(b.settings.OpenTime), b.now)
	b.expect("progress later", BreakerClosed, 1)
}

func TestForgetFailures(t *testing.T) {
	b := newBreakerTest(t)
	b.fail(3)
	b.ForgetFailures(b.now)
	b.expect("its checks pass again", BreakerClosed, 1)
	b.fail(3)
	b.CloseBreaker(b.now)
	b.expect("closed", BreakerClosed, 2)
	b.fail(2)
	b.expect("failures count from then on", BreakerClosed, 2)
}

func TestBreakerStateString(t *testing.T) {
	for state, want := range map[BreakerState]string{BreakerClosed: "closed", BreakerHalfOpen: "half-open", BreakerOpen: "open"} {
		if got := state.String(); got != want {
			t.Errorf("%d: %q, want %q", state, got, want)
		}
	}
}
