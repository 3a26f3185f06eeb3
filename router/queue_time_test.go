package router

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
)

// TestQueueTimeNoneReadyAndBusy holds that time without a backend that is ready and makes progress
// counts towards one limit, and all other time towards another.
func TestQueueTimeNoneReadyAndBusy(t *testing.T) {
	const busy, down, stalled = "busy", "down", "stalled"
	type phase struct {
		state string
		lasts time.Duration
	}
	for name, tc := range map[string]struct {
		phases []phase
		total  time.Duration // of the request itself; 0: none
		want   error         // at the end of the phases or up to 5 s later, not a second before
	}{
		"busy":            {[]phase{{busy, 10 * time.Minute}}, 0, ErrBusy},
		"down":            {[]phase{{down, time.Minute}}, 0, ErrNoneReady},
		"stalled":         {[]phase{{stalled, time.Minute}}, 0, ErrNoneReady},
		"busy, then down": {[]phase{{busy, 5 * time.Minute}, {down, time.Minute}}, 0, ErrNoneReady},
		"down, then busy": {[]phase{{down, 50 * time.Second}, {busy, 10 * time.Minute}}, 0, ErrBusy},
		// and the second in which it is found out
		"none ready twice":            {[]phase{{down, 40 * time.Second}, {busy, time.Minute}, {stalled, 19 * time.Second}}, 0, ErrNoneReady},
		"busy with its own limit":     {[]phase{{busy, 2 * time.Minute}}, 2 * time.Minute, ErrBusy},
		"down with its own limit":     {[]phase{{down, 2 * time.Minute}}, 2 * time.Minute, ErrNoneReady},
		"both with its own limit":     {[]phase{{busy, time.Minute}, {down, 90 * time.Second}}, 150 * time.Second, ErrNoneReady},
		"longer than the other limit": {[]phase{{busy, time.Hour}}, time.Hour, ErrBusy},
	} {
		t.Run(name, func(t *testing.T) {
			r, fleet, c := newFleet(t, 1, "prefix", withQueue, func(o *Options) { o.Queue.BusyTimeout = 10 * time.Minute })
			load := backends.Load{TokensKnown: true, PromptTokens: 1}
			pass := func(state string) { // a second
				c.advance(time.Second)
				if load.PolledAt = c.now; state == busy {
					load.GenerationTokens++
				}
				fleet[0].SetLoad(&load)
				r.ObserveLoad(fleet[0], &load)
				r.Tick()
			}
			set := func(state string) {
				fleet[0].SetState(backends.Ready)
				if state == down {
					fleet[0].SetState(backends.Down)
				}
				for state == stalled && r.CountReady(fleet) > 0 {
					pass(state)
				}
			}
			sent(t, "", submit(r, ask(fleet, 1, 2000)))
			req := ask(fleet, 2, 10)
			req.QueueTimeouts.Total = tc.total
			set(tc.phases[0].state)
			w := submit(r, req)
			for _, p := range tc.phases {
				set(p.state)
				for range p.lasts / time.Second {
					waits(t, p.state, w)
					pass(p.state)
				}
			}
			last := tc.phases[len(tc.phases)-1].state
			for range 5 {
				if w.err == nil {
					pass(last)
				}
			}
			if w.err != tc.want {
				t.Errorf("got %v, want %v", w.err, tc.want)
			}
		})
	}
}

// TestQueueTimeOfRetry holds that a request that a ready backend has failed waits for the others as
// long as where none is ready, and that earlier waits count.
func TestQueueTimeOfRetry(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue, func(o *Options) { o.Queue.BusyTimeout = 10 * time.Minute })
	fleet[1].SetState(backends.Down)
	req := ask(fleet, 1, 10)
	req.Waited = Waited{NoneReady: 20 * time.Second, Busy: 9 * time.Minute}
	w := submit(r, req, fleet[0])
	for range 40 {
		waits(t, "the other may come back", w)
		c.advance(time.Second)
		r.Tick()
	}
	if w.err != ErrNoneReady {
		t.Errorf("got %v, want ErrNoneReady after 40 s more", w.err)
	}
}

// queuedJob is a request of TestAgeingAgainstFirstComeFirstServed.
type queuedJob struct {
	arrival  time.Duration
	prefill  time.Duration
	priority int

	start, reference time.Duration // of its prefill, by the router and in order of arrival; negative: refused
	sentAt           time.Duration // to the backend
}

const jobStep = 20 * time.Millisecond

// drawJobs draws short and long requests that arrive somewhat faster than a backend works, after some
// that arrive together and take as long as burst.
func drawJobs(rng *rand.Rand, priorities int, burst time.Duration) (jobs []*queuedJob, longest time.Duration) {
	load := 0.9 + 0.5*rng.Float64()
	for at := time.Duration(0); at < time.Minute; {
		prefill := time.Duration(2+rng.IntN(10)) * jobStep
		if rng.IntN(12) == 0 {
			prefill = time.Duration(25+rng.IntN(100)) * jobStep
		}
		longest = max(longest, prefill)
		jobs = append(jobs, &queuedJob{arrival: at, prefill: prefill, priority: -rng.IntN(priorities), start: -1, sentAt: -1})
		if burst > 0 {
			burst -= prefill
			continue
		}
		at += time.Duration(2*rng.Float64()*float64(prefill)/load) / jobStep * jobStep
	}
	return jobs, longest
}

// serveInOrder sets when each job would start if a backend served them by priority and then in the
// order of arrival.
func serveInOrder(jobs []*queuedJob) {
	left := slices.Clone(jobs)
	for now := time.Duration(0); len(left) > 0; {
		next := -1
		for i, j := range left {
			if j.arrival <= now && (next < 0 || j.priority < left[next].priority) {
				next = i
			}
		}
		if next < 0 {
			now = left[0].arrival
			continue
		}
		left[next].reference = now
		now += left[next].prefill
		left = slices.Delete(left, next, next+1)
	}
}

// serveByRouter sets when each job starts on a backend that works at the rate that the router
// knows.
func serveByRouter(t *testing.T, jobs []*queuedJob, limit time.Duration) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	start := c.now
	type running struct {
		*queuedJob
		*Reservation
	}
	var queued []running // on the backend, in the order sent
	var busyUntil time.Duration
	left, open := jobs, len(jobs)
	for open > 0 {
		now := c.now.Sub(start)
		for len(left) > 0 && left[0].arrival <= now {
			j := left[0]
			req := ask(fleet, 1+len(left), int(j.prefill.Seconds()*testPrefillRate/tokensPerBlock))
			req.Priority, req.QueueTimeouts.Total = j.priority, limit
			left = left[1:]
			r.Submit(req, func(d *Reservation, _ error) {
				if d == nil {
					open--
					return
				}
				j.sentAt = c.now.Sub(start)
				j.start = max(j.sentAt, busyUntil)
				busyUntil = j.start + j.prefill
				queued = append(queued, running{j, d})
			})
		}
		for len(queued) > 0 && queued[0].start+queued[0].prefill <= now {
			done := queued[0]
			queued, open = queued[1:], open-1
			done.RecordFirstEvent()
			done.Release(Outcome{End: Completed, OutputTokens: 1})
		}
		c.advance(jobStep)
		r.Tick()
	}
}

// TestAgeingAgainstFirstComeFirstServed holds what lab/docs/design.md says about the order: no request
// is refused that would have started in time in the order of arrival, less one prefill that has
// begun; and after half of its time none of its priority that came later precedes a request.
func TestAgeingAgainstFirstComeFirstServed(t *testing.T) {
	const limit = 20 * time.Second
	for seed := range uint64(12) {
		for _, c := range []struct {
			priorities int
			burst      time.Duration
		}{{1, 0}, {2, 0}, {1, limit * 19 / 20}} {
			priorities := c.priorities
			t.Run(fmt.Sprint(seed, " ", priorities, " ", c.burst), func(t *testing.T) {
				jobs, longest := drawJobs(rand.New(rand.NewPCG(seed, 5)), priorities, c.burst)
				serveInOrder(jobs)
				serveByRouter(t, jobs, limit)
				for i, j := range jobs {
					if wait := j.reference - j.arrival; j.start < 0 && j.priority == 1-priorities && wait <= limit-longest-10*jobStep {
						t.Errorf("request %d, of %v, was refused, and would have started after %v", i, j.prefill, wait)
					}
					for _, later := range jobs[i+1:] {
						if later.priority >= j.priority && later.sentAt > j.arrival+limit/2+jobStep && (j.sentAt < 0 && later.sentAt < j.arrival+limit ||
							later.sentAt < j.sentAt) {
							t.Errorf("request %d, of %v, waited since %v and was overtaken at %v", i, j.prefill, j.arrival, later.sentAt)
						}
					}
				}
			})
		}
	}
}

// TestRateOfFullBackends holds that backends at their MaxInFlight, and those that low-priority requests
// leave to others, count as part of the fleet: else its work and its tenants' shares would seem to
// take longer than they do, by as many times as it has backends.
func TestRateOfFullBackends(t *testing.T) {
	for _, priority := range []int{0, 1} {
		r, fleet, c := newFleet(t, 8, "prefix", withQueue, func(o *Options) {
			o.Queue.BusyTimeout, o.Queue.LowPriorityRequests, o.Queue.LowPrioritySlowdown = 10*time.Minute, 10, 0.1
		})
		for i, b := range fleet {
			if priority == 0 {
				b.SetOptions(backends.Options{MaxInFlight: 1})
			}
			sent(t, "", submit(r, ask(fleet[i:i+1], i, 1)))
		}
		req := ask(fleet, 100, 4000)
		req.Priority = priority
		d, err := filterAll(r, req, c.now)
		rate := d.view.LeastPrefill(d.query, d.candidates).Rate
		if want := 8 * testPrefillRate; priority == 0 && err != ErrMaxInFlight || math.Abs(rate/float64(want)-1) > 0.01 {
			t.Errorf("priority %d: %v, rate %v, want %v", priority, err, rate, want)
		}
	}
}

// TestRetryIsNotCharged holds that a request that has waited before, and may go to any backend again,
// is not charged to its tenant once more: the tenant's next one is before that of another tenant.
func TestRetryIsNotCharged(t *testing.T) {
	for _, sentAtOnce := range []bool{false, true} {
		r, fleet, c := newFleet(t, 1, "prefix", withQueue)
		if !sentAtOnce {
			fleet[0].SetState(backends.Down)
		}
		var order []int
		var first *Reservation
		for i, blocks := range []int{400, 10, 10} {
			req := ask(fleet, i, blocks)
			req.Tenant = []uint64{7, 7, 8}[i]
			if i == 0 {
				req.Waited.NoneReady = time.Second
			}
			r.Submit(req, func(d *Reservation, _ error) {
				if first == nil && i == 0 {
					first = d
				}
				order = append(order, i)
			})
			c.advance(time.Millisecond)
		}
		fleet[0].SetState(backends.Ready)
		r.Tick()
		if sentAtOnce {
			first.RecordFirstEvent()
			first.Release(Outcome{End: Completed, OutputTokens: 1})
			order = order[1:]
		}
		if len(order) == 0 || order[0] != 1 {
			t.Errorf("sent at once %v: then %v", sentAtOnce, order)
		}
	}
}
