package health

import (
	"fmt"
	"testing"
	"time"

	"warmroute/backends"
)

var start = time.Unix(1000, 0)

// at returns a time so many seconds after the start.
func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// poll records a poll that shows these counters.
func poll(r *Record, seconds float64, generated float64) *backends.Load {
	l := &backends.Load{TokensKnown: true, GenerationTokens: generated, PolledAt: at(seconds)}
	r.RecordPoll(l, 0, 1, &BreakerSettings{}, l.PolledAt)
	return l
}

// TestStallTimeout sends requests at once and polls every second. The backend is stalled once nothing
// has happened for longer than the timeout.
func TestStallTimeout(t *testing.T) {
	for _, c := range []struct {
		name   string
		sent   []float64 // uncached tokens
		check  StallCheck
		silent float64 // seconds, after which it is not stalled yet, and a little later it is
	}{
		{"nothing to prefill", []float64{0}, StallCheck{InFlight: 1, PrefillRate: 1000, RateKnown: true}, 3},
		{"three times the prefill", []float64{1000}, StallCheck{InFlight: 1, UnstartedTokens: 1000, PrefillRate: 1000, RateKnown: true}, 6},
		{"of all requests", []float64{1000, 500}, StallCheck{InFlight: 2, UnstartedTokens: 1500, PrefillRate: 1000, RateKnown: true}, 7.5},
		{"less what was prefilled", []float64{1000, 500}, StallCheck{InFlight: 2, UnstartedTokens: 500, PrefillRate: 1000, RateKnown: true}, 4.5},
		{"rate not known", []float64{1000}, StallCheck{InFlight: 1, UnstartedTokens: 1000, PrefillRate: 1000}, 15},
		{"other clients' prefill before it", []float64{0}, StallCheck{InFlight: 1, ExternalTokens: 2000, PrefillRate: 1000, RateKnown: true}, 9},
	} {
		r := NewRecord(start)
		poll(r, 0, 1)
		for i, uncached := range c.sent {
			r.RecordSent(&Attempt{SentAt: start, Uncached: uncached}, i == 0, start)
		}
		for _, later := range []time.Duration{0, time.Millisecond} {
			c.check.Now = at(c.silent).Add(later)
			c.check.Load = &backends.Load{TokensKnown: true, GenerationTokens: 1, PolledAt: c.check.Now}
			r.RecordPoll(c.check.Load, c.check.UnstartedTokens, len(c.sent), &BreakerSettings{}, c.check.Now)
			for _, inFlight := range []int64{0, c.check.InFlight} {
				check := c.check
				check.InFlight = inFlight
				if got, want := r.IsStalledNow(&check), inFlight > 0 && later > 0; got != want {
					t.Errorf("%s: stalled is %v after %v with %d sequences in flight, want %v", c.name, got, check.Now.Sub(start), inFlight, want)
				}
			}
		}
	}
}

// What is sent to a silent backend later does not extend the timeout.
func TestStallTimeoutUnderNewRequests(t *testing.T) {
	r := NewRecord(start)
	poll(r, 0, 1)
	sent := 0.0
	stalled := func(seconds float64) bool {
		return r.IsStalledNow(&StallCheck{
			Now: at(seconds), Load: poll(r, seconds, 1), InFlight: 1, UnstartedTokens: sent, PrefillRate: 1000, RateKnown: true,
		})
	}
	for s := range 60 {
		r.RecordSent(&Attempt{SentAt: at(float64(s)), Uncached: 1000}, s == 0, at(float64(s)))
		sent += 1000
		if want := s > 15; stalled(float64(s)) != want { // 3 s, and 3 times those of 4 requests
			t.Errorf("%d s: stalled is %v, want %v", s, !want, want)
		}
	}
}

// Between two polls nothing shows whether the engine works.
func TestSilenceEndsAtLastPoll(t *testing.T) {
	r := NewRecord(start)
	poll(r, 0, 1)
	r.RecordSent(&Attempt{SentAt: start}, true, start)
	check := StallCheck{Now: at(60), Load: poll(r, 2, 1), InFlight: 1, PrefillRate: 1000, RateKnown: true}
	if r.IsStalledNow(&check) {
		t.Error("stalled by a poll 2 s after the request was sent")
	}
	if poll(r, 4, 1); !r.IsStalledNow(&check) {
		t.Error("not stalled by a poll 4 s after the request was sent")
	}
}

func TestSilenceWithoutPolls(t *testing.T) {
	for _, c := range []struct {
		name     string
		unknown  bool   // no token counters
		streams  bool   // a stream has begun
		timedOut []bool // of polls that fail
		stalled  bool
	}{
		{"not polled since", false, false, nil, false},
		{"a stream has stopped", false, true, nil, true},
		{"without counters", true, true, nil, false},
		{"two polls timed out", false, false, []bool{true, true}, false},
		{"three polls timed out", false, false, []bool{true, true, true}, true},
		{"one of five was refused", false, false, []bool{true, true, false, true, true}, false},
		{"three timed out, without counters", true, false, []bool{true, true, true}, false},
	} {
		r := NewRecord(start)
		r.RecordPoll(&backends.Load{TokensKnown: !c.unknown, PolledAt: start}, 0, 0, &BreakerSettings{}, start)
		a := &Attempt{SentAt: start, Streams: true}
		r.RecordSent(a, true, start)
		if c.streams {
			r.RecordFirstOutput(a, 0, start)
		}
		for _, timedOut := range c.timedOut {
			r.RecordPollFailure(timedOut)
		}
		if got := r.IsStalledNow(&StallCheck{Now: at(3.5), InFlight: 1, PrefillRate: 1000}); got != c.stalled {
			t.Errorf("%s: stalled is %v, want %v", c.name, got, c.stalled)
		}
		if poll(r, 4, 2); r.polls.missed != 0 {
			t.Errorf("%s: %d polls are missed after one that succeeded", c.name, r.polls.missed)
		}
	}
}

// TestWork has a backend whose last sign of work is 10 s after the start.
func TestWork(t *testing.T) {
	for name, work := range map[string]func(r *Record, a *Attempt){
		"relayed output": func(r *Record, _ *Attempt) { r.RecordOutput(at(10)) },
		"first output":   func(r *Record, a *Attempt) { r.RecordFirstOutput(a, 0, at(10)) },
		"a poll":         func(r *Record, _ *Attempt) { poll(r, 10, 2) },
		"a poll of other clients' KV cache": func(r *Record, _ *Attempt) {
			r.RecordPoll(&backends.Load{TokensKnown: true, GenerationTokens: 1, KVCacheUsage: 0.1, PolledAt: at(10)}, 0, 1, &BreakerSettings{},
				at(10))
		},
		"a poll that shows no work to do": func(r *Record, _ *Attempt) {
			r.streaming = 1
			r.RecordPoll(&backends.Load{TokensKnown: true, GenerationTokens: 1, QueuesKnown: true, PolledAt: at(10)}, 0, 1, &BreakerSettings{},
				at(10))
		},
	} {
		r := NewRecord(start)
		poll(r, 0, 1)
		a := &Attempt{SentAt: start}
		r.RecordSent(a, true, start)
		work(r, a)
		if got := r.LastProgress(); !got.Equal(at(10)) {
			t.Errorf("%s: the last progress was %v after the start, want 10 s", name, got.Sub(start))
		}
		check := func(seconds float64) *StallCheck {
			return &StallCheck{Now: at(seconds), Load: &backends.Load{}, InFlight: 1, PrefillRate: 1000, RateKnown: true}
		}
		r.polls.at = at(13)
		if r.UpdateStalled(check(13)) || r.IsStalled() {
			t.Errorf("%s: stalled 3 s later", name)
		}
		r.polls.at = at(13.001)
		if !r.UpdateStalled(check(13.001)) || !r.IsStalled() {
			t.Errorf("%s: not stalled more than 3 s later", name)
		}
	}
}

func TestStallsAreCountedOnce(t *testing.T) {
	r := NewRecord(start)
	r.RecordSent(&Attempt{SentAt: start}, true, start)
	generated := 1.0
	poll(r, 0, generated)
	for _, c := range []struct {
		seconds float64
		works   bool
		began   bool
		stalls  uint64
		stalled bool
	}{
		{3, false, false, 0, false},
		{4, false, true, 1, true},
		{5, false, false, 1, true},
		{6, true, false, 1, false},
		{9, false, false, 1, false},
		{10, false, true, 2, true},
	} {
		if c.works {
			generated++
		}
		check := &StallCheck{Now: at(c.seconds), Load: poll(r, c.seconds, generated), InFlight: 1, PrefillRate: 1000, RateKnown: true}
		before := fmt.Sprintf("%+v", r)
		if now := r.IsStalledNow(check); now != c.stalled || fmt.Sprintf("%+v", r) != before {
			t.Errorf("%v s: stalled now is %v, want %v; the record was %s and is %+v", c.seconds, now, c.stalled, before, r)
		}
		if began := r.UpdateStalled(check); began != c.began || r.Stalls() != c.stalls || r.IsStalled() != c.stalled {
			t.Errorf("%v s: stalled %d times, now %v, began %v; want %d, %v, %v", c.seconds, r.Stalls(), r.IsStalled(), began, c.stalls, c.stalled,
				c.began)
		}
	}
}

func TestStreamingCount(t *testing.T) {
	for _, streams := range []bool{true, false} {
		for _, begins := range []bool{true, false} {
			for _, end := range []End{{Processed: true}, {Failed: true}, {QueueFull: true, Failed: true}, {Stalled: true, Failed: true},
				{Stopping: true}} {
				r := NewRecord(start)
				a := &Attempt{SentAt: start, Streams: streams}
				r.RecordSent(a, true, start)
				want := 0
				if begins {
					r.RecordFirstOutput(a, 0, at(1))
				}
				if begins && streams {
					want = 1
				}
				if r.streaming != want {
					t.Errorf("streamed %v, begun %v: %d streams have begun, want %d", streams, begins, r.streaming, want)
				}
				if r.RecordEnd(a, end, &BreakerSettings{}, at(2)); r.streaming != 0 {
					t.Errorf("streamed %v, begun %v, end %+v: %d streams when all have ended", streams, begins, end, r.streaming)
				}
			}
		}
	}
}

func TestIsStopping(t *testing.T) {
	r := NewRecord(start)
	check := func(when string, seconds float64, want bool) {
		t.Helper()
		if got := r.IsStopping(at(seconds)); got != want {
			t.Errorf("%s: stopping is %v, want %v", when, got, want)
		}
	}
	send := func(seconds float64) *Attempt {
		a := &Attempt{SentAt: at(seconds)}
		r.RecordSent(a, false, a.SentAt)
		return a
	}
	stops := End{Stopping: true}
	check("at first", 0, false)
	before := send(1)
	r.RecordEnd(send(2), stops, &BreakerSettings{}, at(2))
	check("it reported so", 2, true)
	r.RecordFirstOutput(before, 0, at(2.5))
	check("a response to what it had before", 2.5, true)
	check("just before the delay has passed", 2.999, true)
	check("after the delay", 2+stoppingDelay.Seconds(), false)
	probe := send(4)
	check("while one request tries it", 4, true)
	check("and has not returned in time", 4+stoppingDelay.Seconds(), false)
	r.RecordFirstOutput(probe, 0, at(4.5))
	check("a response to it", 4.5, false)
	r.RecordEnd(send(5), stops, &BreakerSettings{}, at(5))
	r.ForgetFailures(at(5))
	check("its checks pass again", 5, false)
}

// listener is a StallListener.
type listener struct{}

func (listener) BackendStalled(bool, bool) {}

func TestWatched(t *testing.T) {
	r := NewRecord(start)
	first, second, silent := &Attempt{Listener: listener{}}, &Attempt{Listener: listener{}}, &Attempt{}
	for _, a := range []*Attempt{first, second, silent} {
		r.Watch(a)
	}
	if n := len(r.Watched()); n != 2 {
		t.Errorf("%d requests are watched, want the 2 with a listener", n)
	}
	for range 2 {
		r.Unwatch(first)
		r.Unwatch(silent)
	}
	if w := r.Watched(); len(w) != 1 || w[0] != second {
		t.Errorf("%v are watched, want the second one", w)
	}
	if r.Unwatch(second); len(r.Watched()) != 0 {
		t.Errorf("%d are watched at the end", len(r.Watched()))
	}
}

func TestCondition(t *testing.T) {
	working := func(*Record) {}
	stalls := func(r *Record) {
		r.RecordSent(&Attempt{SentAt: at(1)}, true, at(1))
		r.UpdateStalled(&StallCheck{Now: at(10), Load: poll(r, 10, 0), InFlight: 1, PrefillRate: 1000})
	}
	stops := func(r *Record) {
		r.RecordEnd(&Attempt{}, End{Stopping: true}, &BreakerSettings{}, at(9.5))
	}
	ready := backends.Status{State: backends.Ready, Since: at(2)}
	asleep := &backends.Load{Asleep: true, AsleepSince: at(3)}
	for _, c := range []struct {
		name   string
		setUp  func(*Record)
		status backends.Status
		load   *backends.Load
		want   ConditionState
		since  time.Time
	}{
		{"ready", working, ready, nil, Ready, at(2)},
		{"not checked", working, backends.Status{Since: at(2), Reason: "x"}, nil, Starting, at(2)},
		{"down", stalls, backends.Status{Checked: true, Since: at(2), Reason: "x"}, asleep, Down, at(2)},
		{"draining", stops, backends.Status{State: backends.Draining, Since: at(2), Reason: "x"}, nil, Draining, at(2)},
		{"stopping", stops, ready, asleep, Stopping, at(9.5)},
		{"asleep", stalls, ready, asleep, Asleep, at(3)},
		{"stalled", stalls, ready, &backends.Load{}, Stalled, at(1)},
	} {
		r := NewRecord(start)
		poll(r, 0, 0)
		c.setUp(r)
		got := r.Condition(&c.status, c.load, at(10))
		if got.State != c.want || !got.Since.Equal(c.since) || (got.Reason == "") != (c.want == Ready) {
			t.Errorf("%s: %+v, want %s since %v", c.name, got, c.want, c.since)
		}
	}
}
