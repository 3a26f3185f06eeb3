package cluster

import (
	"testing"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router"
)

func TestOutboxBound(t *testing.T) {
	b := newBackend(t, "http://10.0.0.1:8000")
	o := NewOutbox()
	sent := sampleEvents(b)[0]
	sent.Blocks = make([]prompt.Block, 1000)
	messages := int64(0)
	for i := range 4000 {
		sent.ID = uint64(i)
		for _, e := range []*router.PlacementEvent{&sent, {Kind: router.PlacementEnded, Placement: router.Placement{ID: sent.ID}}} {
			if o.current.empty() {
				messages++
			}
			o.ReportPlacement(e)
		}
	}
	bytes, dropped := o.waiting()
	if bytes > maxOutboxBytes+2*fullMessageBytes || dropped == 0 {
		t.Errorf("%d bytes wait, %d messages were dropped", bytes, dropped)
	}
	taken := int64(0)
	for e := o.removeOldest(); e != nil; e = o.removeOldest() {
		if len(e.message(messageHead{1, 2, 3, testTime}, authenticator{})) > maxMessageBytes {
			t.Errorf("message of %d bytes", e.Len())
		}
		taken++
	}
	if taken+dropped != messages {
		t.Errorf("%d messages were taken and %d dropped, want %d together", taken, dropped, messages)
	}
	if bytes, _ := o.waiting(); bytes != 0 || len(o.inFlight) != 0 {
		t.Errorf("%d bytes and %d requests are left", bytes, len(o.inFlight))
	}
}

func TestOutboxListsInFlight(t *testing.T) {
	b := newBackend(t, "http://10.0.0.1:8000")
	o := NewOutbox()
	for id := range uint64(3) {
		e := sampleEvents(b)[0]
		e.ID = id
		o.ReportPlacement(&e)
	}
	o.ReportPlacement(&router.PlacementEvent{Kind: router.PlacementPrefilled, Placement: router.Placement{ID: 1}})
	o.ReportPlacement(&router.PlacementEvent{Kind: router.PlacementEnded, Placement: router.Placement{ID: 2}})
	o.addInFlight()
	_, rest, err := parseHead(o.removeOldest().message(messageHead{1, 2, 3, testTime}, authenticator{}), authenticator{})
	if err != nil {
		t.Fatal(err)
	}
	updates, err := parseUpdates(rest, func(string) *backends.Backend { return b })
	if err != nil {
		t.Fatal(err)
	}
	last := updates[len(updates)-1]
	if last.kind != updateInFlight || len(last.inFlight) != 2 {
		t.Fatalf("the last update is %+v", last)
	}
	for _, p := range last.inFlight {
		if p.ID > 1 || p.Prefilled != (p.ID == 1) || p.Backend != b || len(p.Blocks) > 0 {
			t.Errorf("listed %+v", p)
		}
	}
}
