package router

import (
	"context"
	"errors"
	"testing"
	"time"

	"warmroute/backends"
)

// forEndpoint is ask for an endpoint.
func forEndpoint(e backends.Endpoint, fleet []*backends.Backend, key int) *Request {
	req := ask(fleet, key, 4)
	req.Endpoint = e
	return req
}

func TestEndpointFilter(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	holder := mustPick(t, r, forEndpoint(2, fleet, 1))
	holder.RecordFirstEvent()
	holder.Release(Outcome{End: Completed})
	holder.Backend.RecordMissingEndpoint(2, c.now)
	other := fleet[1-holder.Backend.Slot]
	if d := mustPick(t, r, forEndpoint(2, fleet, 1)); d.Backend != other {
		t.Errorf("sent to %s, which lacks the endpoint", d.Backend.Name)
	}
	if d := mustPick(t, r, forEndpoint(3, fleet, 1)); d.Backend != holder.Backend {
		t.Errorf("another endpoint: sent to %s", d.Backend.Name)
	}
	e := r.Explain(*forEndpoint(2, fleet, 1))
	if x := explanationOf(t, &e, holder.Backend); x.Candidate || x.Filter != "endpoint_missing" || x.WhyNot != "does not serve the endpoint" {
		t.Errorf("got %+v", x)
	}
	says(t, e, holder.Backend.Name+" does not serve the endpoint")
	if _, err := r.Pick(context.Background(), forEndpoint(2, fleet, 1), other); !errors.Is(err, ErrNoneReady) {
		t.Errorf("after the other failed: %v", err)
	}

	other.RecordMissingEndpoint(2, c.now)
	for _, tried := range [][]*backends.Backend{nil, {other}, fleet} {
		if _, err := r.Pick(context.Background(), forEndpoint(2, fleet, 1), tried...); !errors.Is(err, ErrEndpointMissing) {
			t.Errorf("none has it, %d tried: %v", len(tried), err)
		}
	}
	if e := r.Explain(*forEndpoint(2, fleet, 1)); e.Refused != ErrEndpointMissing.Error() || e.Queued != "" {
		t.Errorf("got %+v", e)
	}
	c.advance(time.Hour)
	mustPick(t, r, forEndpoint(2, fleet, 1))
}

func TestQueueForEndpoint(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue)
	fleet[0].RecordMissingEndpoint(2, c.now)
	fleet[1].SetState(backends.Down)
	w := submit(r, forEndpoint(2, fleet, 1))
	if !w.waits() {
		t.Fatalf("got %v, %v", w.d, w.err)
	}
	if d := mustPick(t, r, forEndpoint(3, fleet, 2)); d.Backend != fleet[0] {
		t.Error("a request for another endpoint waits behind it")
	}
	fleet[1].SetState(backends.Ready)
	r.BackendStateChanged(fleet[1])
	if w.d == nil || w.d.Backend != fleet[1] {
		t.Fatalf("got %v, %v", w.d, w.err)
	}

	fleet[1].SetState(backends.Down)
	w = submit(r, forEndpoint(2, fleet, 1))
	fleet[1].RecordMissingEndpoint(2, c.now)
	r.Tick()
	if !errors.Is(w.err, ErrEndpointMissing) {
		t.Errorf("none has it: %v", w.err)
	}
}

// A request is not taken from a stalled backend when the other lacks its endpoint.
func TestStallNoticeOfMissingEndpoint(t *testing.T) {
	s := newStalls(t, 2)
	_, calls := s.watch(true)
	s.fleet[1].RecordMissingEndpoint(0, s.clock.now)
	s.pass(10*time.Second, nil)
	if calls.times == 0 || calls.elsewhere != 0 {
		t.Errorf("called %+v", *calls)
	}
}
