package decide

import (
	"slices"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/health"
	"warmroute/router/ledger"
)

func TestFindFilter(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(f *Fleet, b *Backend, q *Query)
		want   string // name of the filter
	}{
		{"none", func(*Fleet, *Backend, *Query) {}, ""},

		{"down", func(_ *Fleet, b *Backend, _ *Query) { b.State = backends.Down }, "unready"},
		{"draining", func(_ *Fleet, b *Backend, _ *Query) { b.State = backends.Draining }, "draining"},
		{"stopping", func(_ *Fleet, b *Backend, _ *Query) { b.Stopping = true }, "stopping"},
		{"asleep", func(_ *Fleet, b *Backend, _ *Query) { b.Asleep = true }, "asleep"},
		{"down and stopping", func(_ *Fleet, b *Backend, _ *Query) { b.State, b.Stopping = backends.Down, true }, "unready"},
		{"draining and asleep", func(_ *Fleet, b *Backend, _ *Query) { b.State, b.Asleep = backends.Draining, true }, "draining"},
		{"stopping and asleep", func(_ *Fleet, b *Backend, _ *Query) { b.Stopping, b.Asleep = true, true }, "stopping"},
		{"down and tried", func(_ *Fleet, b *Backend, q *Query) { b.State, q.Tried = backends.Down, q.Backends }, "unready"},

		{"tried", func(_ *Fleet, _ *Backend, q *Query) { q.Tried = q.Backends }, "tried"},
		{"another was tried", func(_ *Fleet, _ *Backend, q *Query) { q.Tried = []*backends.Backend{{}} }, ""},
		{"tried and stalled", func(_ *Fleet, b *Backend, q *Query) { b.Stalled, q.Tried = true, q.Backends }, "tried"},

		{"lacks the endpoint", func(_ *Fleet, b *Backend, q *Query) { b.Missing, q.Endpoint = 1<<3, 3 }, "endpoint_missing"},
		{"lacks another endpoint", func(_ *Fleet, b *Backend, q *Query) { b.Missing, q.Endpoint = 1<<3, 2 }, ""},

		{"at max_in_flight", func(_ *Fleet, b *Backend, _ *Query) { b.MaxInFlight, b.KnownInFlight = 2, 2 }, "max_in_flight"},
		{"at max_in_flight and stalled", func(_ *Fleet, b *Backend, _ *Query) {
			b.MaxInFlight, b.KnownInFlight, b.Stalled = 2, 2, true
		}, "max_in_flight"},
		{"as many sequences as are free", func(_ *Fleet, b *Backend, q *Query) { b.MaxInFlight, b.KnownInFlight, q.Sequences = 4, 2, 2 }, ""},
		{"more sequences than are free", func(_ *Fleet, b *Backend, q *Query) {
			b.MaxInFlight, b.KnownInFlight, q.Sequences = 4, 2, 3
		}, "max_in_flight"},
		{"more sequences than there ever are, alone", func(_ *Fleet, b *Backend, q *Query) { b.MaxInFlight, q.Sequences = 4, 9 }, ""},
		{"claimed sequences", func(_ *Fleet, b *Backend, _ *Query) {
			b.MaxInFlight, b.KnownInFlight, b.Claimed.Sequences = 4, 2, 2
		}, "max_in_flight"},
		{"no engine works on it", func(_ *Fleet, b *Backend, q *Query) { b.MaxInFlight, b.KnownInFlight, q.NoEngine = 2, 2, true }, ""},

		{"stalled", func(_ *Fleet, b *Backend, _ *Query) { b.Stalled = true }, "stalled"},
		{"stalled, and its probe is due", func(_ *Fleet, b *Backend, _ *Query) { b.Stalled, b.ProbeDue = true, true }, "stalled"},

		{"probe", func(_ *Fleet, b *Backend, _ *Query) { b.ProbeDue, b.Breaker = true, health.BreakerHalfOpen }, "probe"},
		{"a retry does not probe", func(_ *Fleet, b *Backend, q *Query) {
			b.ProbeDue, b.Breaker, q.Tried = true, health.BreakerHalfOpen, []*backends.Backend{{}}
		}, "breaker_open"},
		{"nor does one that no engine works on", func(_ *Fleet, b *Backend, q *Query) {
			b.ProbeDue, b.Breaker, q.NoEngine = true, health.BreakerHalfOpen, true
		}, "breaker_open"},
		{"a full queue is not probed", func(_ *Fleet, b *Backend, _ *Query) {
			b.ProbeDue, b.Breaker, b.QueueFull = true, health.BreakerHalfOpen, true
		}, "queue_full"},
		{"nor with a prompt that is too long", func(_ *Fleet, b *Backend, q *Query) {
			b.ProbeDue, b.Breaker, q.ContextLengths = true, health.BreakerHalfOpen, contextLengths(t, 100)
		}, "prompt_too_long"},

		{"too long for the cache", func(_ *Fleet, b *Backend, _ *Query) { b.Capacity = 100 }, "prompt_too_long"},
		{"too long, under a policy that ignores it", func(f *Fleet, b *Backend, _ *Query) {
			f.Policy.FiltersLength, b.Capacity = false, 100
		}, ""},
		{"too long and queue full", func(_ *Fleet, b *Backend, _ *Query) { b.Capacity, b.QueueFull = 100, true }, "prompt_too_long"},
		{"too long and queue full, where requests are queued", func(f *Fleet, b *Backend, _ *Query) {
			f.HasQueue, b.Capacity, b.QueueFull = true, 100, true
		}, "queue_full"},
		{"no engine works on it, queue full", func(f *Fleet, b *Backend, q *Query) {
			f.HasQueue, b.QueueFull, q.NoEngine = true, true, true
		}, "queue_full"},
		{"queue full", func(_ *Fleet, b *Backend, _ *Query) { b.QueueFull = true }, "queue_full"},
		{"queue full and breaker open", func(_ *Fleet, b *Backend, _ *Query) { b.QueueFull, b.Breaker = true, health.BreakerOpen }, "queue_full"},
		{"breaker open", func(_ *Fleet, b *Backend, _ *Query) { b.Breaker = health.BreakerOpen }, "breaker_open"},
		{"breaker half open, the probe is under way", func(_ *Fleet, b *Backend, _ *Query) {
			b.Breaker = health.BreakerHalfOpen
		}, "breaker_open"},

		{"a stored response is looked up", func(_ *Fleet, b *Backend, q *Query) {
			b.State, b.Stalled, q.Stored, q.NoEngine = backends.Draining, true, true, true
		}, ""},
		{"a stored response is continued", func(_ *Fleet, b *Backend, q *Query) { b.State, q.Stored = backends.Draining, true }, "draining"},
	} {
		f, all := newFleet(t, 1)
		learnTextLength(f)
		q := newQuery(all, 10)
		tc.change(f, &f.Backends[0], q)
		got := ""
		if filter := f.findFilter(q, &f.Backends[0]); filter != nil {
			got = filter.name
			if filter.description == "" {
				t.Errorf("%s: the filter %s has no description", tc.name, got)
			}
		}
		if got != tc.want {
			t.Errorf("%s: filter %q, want %q", tc.name, got, tc.want)
		}
	}
	f, all := newFleet(t, 1)
	if filter := f.findFilter(newQuery(all, 10), nil); filter != &removedFilter {
		t.Errorf("a backend that was removed: got %+v", filter)
	}
}

// The filters that only rank a backend have no effect where none of a lower rank exists.
func TestFilterRanks(t *testing.T) {
	down := func(b *Backend) { b.State = backends.Down }
	full := func(b *Backend) { b.MaxInFlight, b.KnownInFlight = 1, 1 }
	stalled := func(b *Backend) { b.Stalled = true }
	tooLong := func(b *Backend) { b.Capacity = 100 }
	open := func(b *Backend) { b.Breaker = health.BreakerOpen }
	refusing := func(b *Backend) { b.QueueFull = true }
	probe := func(b *Backend) { b.Breaker, b.ProbeDue = health.BreakerHalfOpen, true }
	removed := func(b *Backend) { b.Backend = nil }
	none := func(*Backend) {}
	var c Candidates // reused
	for _, tc := range []struct {
		name       string
		change     [3]func(*Backend)
		want, full []int // slots
		err        error
	}{
		{"refusing, requests are queued", [3]func(*Backend){refusing, none, none}, []int{1, 2}, []int{0}, nil},
		{"all refuse, requests are queued", [3]func(*Backend){refusing, refusing, down}, nil, []int{0, 1}, ErrReplicasFull},
		{"one refuses, one is full", [3]func(*Backend){full, refusing, down}, nil, []int{0, 1}, ErrMaxInFlight},
		{"one refuses, another is full", [3]func(*Backend){refusing, full, down}, nil, []int{0, 1}, ErrMaxInFlight},
		{"all", [3]func(*Backend){none, none, none}, []int{0, 1, 2}, nil, nil},
		{"one is down", [3]func(*Backend){none, down, none}, []int{0, 2}, nil, nil},
		{"one was removed", [3]func(*Backend){removed, none, none}, []int{1, 2}, nil, nil},
		{"an open breaker", [3]func(*Backend){none, open, none}, []int{0, 2}, nil, nil},
		{"nothing but failing ones", [3]func(*Backend){open, open, refusing}, []int{0, 1, 2}, nil, nil},
		{"failing before too small", [3]func(*Backend){tooLong, open, stalled}, []int{1}, nil, nil},
		{"too small before stalled", [3]func(*Backend){stalled, stalled, tooLong}, []int{2}, nil, nil},
		{"nothing but stalled ones", [3]func(*Backend){stalled, stalled, down}, []int{0, 1}, nil, nil},
		{"preferred before all of these", [3]func(*Backend){stalled, tooLong, none}, []int{2}, nil, nil},
		{"a probe before the preferred", [3]func(*Backend){none, none, probe}, []int{2}, nil, nil},
		{"all probes", [3]func(*Backend){probe, none, probe}, []int{0, 2}, nil, nil},
		{"one is full", [3]func(*Backend){none, full, none}, []int{0, 2}, []int{1}, nil},
		{"full or down", [3]func(*Backend){full, down, full}, nil, []int{0, 2}, ErrMaxInFlight},
		{"all are down", [3]func(*Backend){down, down, down}, nil, nil, ErrNoneReady},
	} {
		f, all := newFleet(t, 3)
		learnTextLength(f)
		f.HasQueue = strings.Contains(tc.name, "refuse") || strings.Contains(tc.name, "queued")
		for slot, change := range tc.change {
			change(&f.Backends[slot])
		}
		err := f.Filter(newQuery(all, 10), &c)
		var got, listed []int
		for i := range c.list {
			got = append(got, c.list[i].Slot)
			listed = append(listed, c.backends[i].Slot)
		}
		var fullSlots []int
		for _, b := range c.full {
			fullSlots = append(fullSlots, b.Slot)
		}
		if err != tc.err || !slices.Equal(got, tc.want) || !slices.Equal(listed, tc.want) || !slices.Equal(fullSlots, tc.full) {
			t.Errorf("%s: candidates %v (%v), full %v, error %v; want %v, full %v, %v",
				tc.name, got, listed, fullSlots, err, tc.want, tc.full, tc.err)
		}
		if want := float64(prefillRate * (len(tc.want) + len(tc.full))); c.fleetRate != want {
			t.Errorf("%s: they prefill %v tokens a second together, want %v", tc.name, c.fleetRate, want)
		}
	}
}

// TestNoneReadyAndUntriedBackend checks what is known of a request that no candidate takes now.
func TestNoneReadyAndUntriedBackend(t *testing.T) {
	lacks := func(b *Backend) { b.Missing = 1 << 2 }
	for _, tc := range []struct {
		name                        string
		change                      func(*Backend)
		tried                       bool
		noneReady, untried, missing bool
	}{
		{"ready", func(*Backend) {}, false, false, true, false},
		{"at max_in_flight", func(b *Backend) { b.MaxInFlight, b.KnownInFlight = 1, 1 }, false, false, true, false},
		{"breaker open", func(b *Backend) { b.Breaker = health.BreakerOpen }, false, false, true, false},
		{"down", func(b *Backend) { b.State = backends.Down }, false, true, true, false},
		{"draining", func(b *Backend) { b.State = backends.Draining }, false, true, true, false},
		{"stopping", func(b *Backend) { b.Stopping = true }, false, true, true, false},
		{"asleep", func(b *Backend) { b.Asleep = true }, false, true, true, false},
		{"stalled", func(b *Backend) { b.Stalled = true }, false, true, true, false},
		{"tried", func(*Backend) {}, true, true, false, false},
		{"lacks the endpoint", lacks, false, true, false, true},
		{"lacks another endpoint", func(b *Backend) { b.Missing = 1 << 1 }, false, false, true, false},
		{"is removed soon", func(b *Backend) { b.Retiring = true }, false, false, false, false},
		{"is removed soon and lacks it", func(b *Backend) { b.Retiring = true; lacks(b) }, false, true, false, false},
		{"was removed", func(b *Backend) { b.Backend = nil }, false, true, false, false},
	} {
		f, all := newFleet(t, 2)
		q := newQuery(all[:1], 10)
		q.Endpoint = 2
		tc.change(&f.Backends[0])
		var tried []*backends.Backend
		if tc.tried {
			tried = all[:1]
		}
		if got := f.NoneReady(q.Request, tried); got != tc.noneReady {
			t.Errorf("%s: none ready %v, want %v", tc.name, got, tc.noneReady)
		}
		if got := f.HasUntriedBackend(q.Request, tried); got != tc.untried {
			t.Errorf("%s: untried backend %v, want %v", tc.name, got, tc.untried)
		}
		if got := f.IsEndpointMissing(q.Request); got != tc.missing {
			t.Errorf("%s: endpoint missing %v, want %v", tc.name, got, tc.missing)
		}

		q.Backends = all // the other one may take it
		if f.NoneReady(q.Request, tried) || !f.HasUntriedBackend(q.Request, tried) || f.IsEndpointMissing(q.Request) {
			t.Errorf("%s, beside one that is ready: none ready %v, untried backend %v, endpoint missing %v", tc.name,
				f.NoneReady(q.Request, tried), f.HasUntriedBackend(q.Request, tried), f.IsEndpointMissing(q.Request))
		}
	}
}

// One that is removed soon does not count as one that may have the endpoint.
func TestIsEndpointMissingBesideRetiring(t *testing.T) {
	f, all := newFleet(t, 2)
	f.Backends[0].Missing, f.Backends[1].Retiring = 1, true
	if !f.IsEndpointMissing(newQuery(all, 1).Request) {
		t.Error("the endpoint is not missing")
	}
}

func TestNeedsHeadroom(t *testing.T) {
	for _, tc := range []struct {
		name               string
		limits             bool
		priority           int
		promoted, noEngine bool
		want               bool
	}{
		{"low priority", true, 1, false, false, true},
		{"normal", true, 0, false, false, false},
		{"urgent", true, -1, false, false, false},
		{"low priority, promoted", true, 1, true, false, false},
		{"low priority, without an engine", true, 1, false, true, false},
		{"low priority, no interactive requests", false, 1, false, false, false},
	} {
		f := &Fleet{LimitsLowPriority: tc.limits}
		if got := f.NeedsHeadroom(&Request{Priority: tc.priority, NoEngine: tc.noEngine}, tc.promoted); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestHasLowPriorityRoom(t *testing.T) {
	for _, tc := range []struct {
		name            string
		change          func(*Backend)
		hasRoom, shared bool
		want            bool
	}{
		{"no room", func(*Backend) {}, false, false, false},
		{"for low-priority requests alone", func(b *Backend) { b.QueuedTokens, b.UsedKVTokens = 1, 1000 }, true, false, true},
		{"shared", func(*Backend) {}, true, true, true},
		{"shared, without room", func(*Backend) {}, false, true, false},
		{"shared, with something to prefill", func(b *Backend) { b.QueuedTokens = 1 }, true, true, false},
		{"shared, a fifth of the cache fits", func(b *Backend) { b.UsedKVTokens = 800 }, true, true, true},
		{"shared, less fits", func(b *Backend) { b.UsedKVTokens = 801 }, true, true, false},
	} {
		f, _ := newFleet(t, 1)
		b := &f.Backends[0]
		b.Capacity = 1000
		tc.change(b)
		if got := b.HasLowPriorityRoom(tc.hasRoom, tc.shared); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestFilterByHeadroom(t *testing.T) {
	f, all := newFleet(t, 3)
	var c Candidates
	if err := f.Filter(newQuery(all, 4), &c); err != nil {
		t.Fatal(err)
	}
	if err := c.FilterByHeadroom(func(slot int) bool { return slot != 1 }); err != nil {
		t.Fatal(err)
	}
	if len(c.list) != 2 || c.list[0].Slot != 0 || c.list[1].Slot != 2 || !slices.Equal(c.backends, []*backends.Backend{all[0], all[2]}) {
		t.Errorf("candidates %+v", c.list)
	}
	if c.fleetRate != 3*prefillRate {
		t.Errorf("they prefill %v tokens a second together, want those without headroom included", c.fleetRate)
	}
	if err := c.FilterByHeadroom(func(int) bool { return false }); err != errNoHeadroom || len(c.list) != 0 || len(c.backends) != 0 {
		t.Errorf("none has headroom: got %v, %d candidates", err, len(c.list))
	}
}

func TestCountedSequences(t *testing.T) {
	for _, tc := range []struct {
		req  Request
		want int64
	}{
		{Request{}, 1},
		{Request{Sequences: 3}, 3},
		{Request{Sequences: 1 << 20}, ledger.MaxSequences},
		{Request{Sequences: 3, NoEngine: true}, 0},
	} {
		if got := tc.req.CountedSequences(); got != tc.want {
			t.Errorf("%d sequences, no engine %v: counted as %d, want %d", tc.req.Sequences, tc.req.NoEngine, got, tc.want)
		}
	}
}

func TestCountMedia(t *testing.T) {
	one, both := prompt.MediaCounts{prompt.Image: 1}, prompt.MediaCounts{prompt.Image: 1, prompt.Audio: 1}
	req := Request{MediaItems: []prompt.MediaPosition{{Counts: one}, {Counts: both}}}
	if got := req.CountMedia(); got != both {
		t.Errorf("got %v, want the counts up to the last one", got)
	}
	req.MediaItems = nil
	if got := req.CountMedia(); got != (prompt.MediaCounts{}) {
		t.Errorf("got %v of none", got)
	}
}
