package decide

import (
	"net/url"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/health"
)

// newPDFleet returns a fleet of one replica for prefill, in slot 0, and two for decode.
func newPDFleet(t *testing.T) (*Fleet, []*backends.Backend) {
	f, all := newFleet(t, 3)
	f.Disaggregation = DisaggregationSettings{Lease: 30 * time.Second}
	setKVForms(f)
	f.HasPrefillReplica = true
	f.Backends[0].Role, f.Backends[1].Role, f.Backends[2].Role = backends.RolePrefill, backends.RoleDecode, backends.RoleDecode
	return f, all
}

// setKVForms has all replicas keep KV in the same form.
func setKVForms(f *Fleet) {
	b := backends.New("", &url.URL{}, "", nil)
	b.SetVersion("0.32.0")
	b.SetLoad(&backends.Load{TransfersKV: true})
	for i := range f.Backends {
		f.Backends[i].KVForm = b.KVForm()
	}
}

func TestDecideSplit(t *testing.T) {
	const long = 2000 // blocks: the prefill takes longer than the KV transfer
	type change func(*Fleet, *Query)
	for _, tc := range []struct {
		name   string
		blocks int
		change change
		want   string
	}{
		{"a long prompt beside outputs", long, nil, SplitDone},
		{"a short prompt beside an output", 10, func(f *Fleet, _ *Query) { f.Backends[1].KnownInFlight = 1 }, SplitCheaper},
		{"a long prompt that is cached where it is decoded", long, func(_ *Fleet, q *Query) { q.Matched[1] = long }, SplitCheaper},
		{"no output beside it", long, func(f *Fleet, _ *Query) { f.Backends[1].KnownInFlight = 0 }, SplitCheaper},
		{"no output beside it, but a minimum that it exceeds", long, func(f *Fleet, _ *Query) {
			f.Backends[1].KnownInFlight, f.Disaggregation.MinUncachedTokens = 0, long*blockTokens/2
		}, SplitDone},
		{"fewer tokens than the minimum", long, func(f *Fleet, _ *Query) {
			f.Disaggregation.MinUncachedTokens = 2 * long * blockTokens
		}, SplitCheaper},
		{"much to do before it where its prefill would be", long, func(f *Fleet, _ *Query) { f.Backends[0].QueuedSeconds = 3600 }, SplitCheaper},
		{"not splittable", long, func(_ *Fleet, q *Query) { q.Splittable = false }, SplitUnsplittable},
		{"no prefill replica is up", long, func(f *Fleet, _ *Query) { f.Backends[0].State = backends.Down }, SplitNoPrefill},
		{"none pairs with it", long, func(f *Fleet, _ *Query) { f.Backends[0].KVForm = backends.KVForm{} }, SplitNoPrefill},
		{"its transfers to it keep failing", long, func(f *Fleet, _ *Query) {
			f.AvoidedPairs = map[Pair]time.Time{{f.Backends[0].Backend, f.Backends[1].Backend}: f.Now.Add(time.Second)}
		}, SplitNoPrefill},
		{"its transfers to it have failed", long, func(f *Fleet, _ *Query) {
			f.AvoidedPairs = map[Pair]time.Time{{f.Backends[0].Backend, f.Backends[1].Backend}: f.Now.Add(-time.Second)}
		}, SplitDone},
		{"it is stalled", long, func(f *Fleet, _ *Query) { f.Backends[0].Stalled = true }, SplitNoPrefill},
		{"it has no room", long, func(f *Fleet, _ *Query) {
			f.Backends[0].KnownInFlight, f.Backends[0].NearlyFull, f.Backends[0].HasWaiting = 1, true, true
		}, SplitFull},
		{"it was tried", long, func(f *Fleet, q *Query) { q.Tried = []*backends.Backend{f.Backends[0].Backend} }, SplitNoPrefill},
		{"no decode replica is up", long, func(f *Fleet, _ *Query) {
			f.Backends[1].State, f.Backends[2].State = backends.Down, backends.Down
		}, SplitNoDecode},
		{"the decode replica has too much to do", long, func(f *Fleet, _ *Query) {
			f.Backends[1].QueuedSeconds, f.Backends[2].QueuedSeconds = 20, 20
		}, SplitLate},
		{"the decode replica is to be probed", long, func(f *Fleet, _ *Query) { f.Backends[1].ProbeDue = true }, SplitUnsplittable},
		{"its prefill was done", long, func(f *Fleet, q *Query) { q.PrefilledOn = f.Backends[0].Backend }, SplitDone},
		{"no roles", long, func(f *Fleet, _ *Query) {
			for i := range f.Backends {
				f.Backends[i].Role = backends.RoleBoth
			}
			f.HasPrefillReplica = false
		}, ""},
		{"whole requests beside prefill", long, func(f *Fleet, _ *Query) { f.Backends[1].Role = backends.RoleBoth }, SplitDone},
	} {
		f, all := newPDFleet(t)
		f.Backends[1].KnownInFlight, f.Backends[2].KnownInFlight = 20, 20
		q := newQuery(all, tc.blocks)
		q.Splittable = true
		if tc.change != nil {
			tc.change(f, q)
		}
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		s := f.DecideSplit(q, f.choice(&c, 0))
		if s.Result != tc.want {
			t.Errorf("%s: %q with costs of %+v, want %q", tc.name, s.Result, s.Cost, tc.want)
		}
		if wantPrefill := tc.want == SplitDone && q.PrefilledOn == nil; (s.Prefill != nil) != wantPrefill {
			t.Errorf("%s: the prefill is on %v", tc.name, s.Prefill)
		}
	}
}

// TestSplitToFreePrefillReplica checks that of two the one with less to do takes the prefill, unless the other has the prompt.
func TestSplitToFreePrefillReplica(t *testing.T) {
	f, all := newFleet(t, 3)
	f.HasPrefillReplica = true
	setKVForms(f)
	f.Disaggregation.Lease = time.Minute
	f.Backends[0].Role, f.Backends[1].Role, f.Backends[2].Role = backends.RolePrefill, backends.RolePrefill, backends.RoleDecode
	f.Backends[2].KnownInFlight, f.Backends[0].QueuedSeconds = 50, 1
	q := newQuery(all, 2000)
	q.Splittable = true
	for _, want := range []int{1, 0} {
		var c Candidates
		if err := f.Filter(q, &c); err != nil {
			t.Fatal(err)
		}
		if s := f.DecideSplit(q, f.choice(&c, 0)); s.Prefill == nil || s.Prefill.Slot != want {
			t.Errorf("the prefill is on %+v, want slot %d", s.Prefill, want)
		}
		q.Matched[0] = 2000
	}
}

func TestRoleFilters(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Fleet, *Query)
		want   []int // candidates
	}{
		{"all are ready", func(*Fleet, *Query) {}, []int{1, 2}},
		{"no decode replica", func(f *Fleet, _ *Query) { f.Backends[1].State, f.Backends[2].State = backends.Down, backends.Down }, []int{0}},
		{"a failing decode replica alone", func(f *Fleet, _ *Query) {
			f.Backends[1].State, f.Backends[2].QueueFull = backends.Down, true
		}, []int{0}},
		{"no prefill replica", func(f *Fleet, _ *Query) { f.Backends[0].State = backends.Down }, []int{1, 2}},
		{"no decode replica, and requests wait", func(f *Fleet, _ *Query) {
			f.Disaggregation.Queue, f.Backends[1].State, f.Backends[2].State = true, backends.Down, backends.Down
		}, nil},
		{"no prefill replica, and requests wait", func(f *Fleet, _ *Query) {
			f.Disaggregation.Queue, f.Backends[0].State = true, backends.Down
		}, nil},
		{"no prefill replica, and requests wait that can be split", func(f *Fleet, q *Query) {
			f.Disaggregation.Queue, f.Backends[0].State, q.Splittable = true, backends.Down, false
		}, []int{1, 2}},
		{"no prefill replica, requests wait, and one does both", func(f *Fleet, _ *Query) {
			f.Disaggregation.Queue, f.Backends[0].State, f.Backends[2].Role = true, backends.Down, backends.RoleBoth
		}, []int{2}},
		{"the prefill was done for one of them", func(f *Fleet, q *Query) {
			q.PrefilledOn = f.Backends[0].Backend
			f.Backends[1].KVForm = backends.KVForm{}
		}, []int{2}},
		{"the prefill was done, and requests wait", func(f *Fleet, q *Query) {
			f.Disaggregation.Queue, q.PrefilledOn = true, f.Backends[0].Backend
		}, []int{1, 2}},
		{"the prefill replica is to be probed, and requests wait", func(f *Fleet, _ *Query) {
			f.Disaggregation.Queue, f.Backends[0].ProbeDue, f.Backends[0].Breaker = true, true, health.BreakerHalfOpen
		}, []int{1, 2}},
	} {
		f, all := newPDFleet(t)
		q := newQuery(all, 100)
		q.Splittable = true
		tc.change(f, q)
		var c Candidates
		err := f.Filter(q, &c)
		var got []int
		for _, b := range c.backends {
			got = append(got, b.Slot)
		}
		if len(got) != len(tc.want) || (err == nil) != (len(got) > 0) {
			t.Errorf("%s: %v, %v; want %v", tc.name, got, err, tc.want)
			continue
		}
		for i := range got {
			if got[i] != tc.want[i] {
				t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
			}
		}
	}
}

// TestPrefillReplicaIsNoHopeOfWaitingRequests checks that where requests wait for a replica for decode, one for prefill is
// neither another to try nor one that is ready.
func TestPrefillReplicaIsNoHopeOfWaitingRequests(t *testing.T) {
	for _, queue := range []bool{false, true} {
		f, all := newPDFleet(t)
		f.Disaggregation.Queue = queue
		f.Backends[1].State, f.Backends[2].State = backends.Down, backends.Down
		q := newQuery(all, 100)
		if got := f.HasUntriedBackend(q.Request, all[1:]); got == queue {
			t.Errorf("queue %v: another backend to try: %v", queue, got)
		}
		if got := f.NoneReady(q.Request, nil); got != queue {
			t.Errorf("queue %v: none ready: %v", queue, got)
		}
		q.NoEngine = true
		if !f.HasUntriedBackend(q.Request, all[1:]) || f.NoneReady(q.Request, nil) {
			t.Errorf("queue %v: a request without an engine waits", queue)
		}
	}
}
