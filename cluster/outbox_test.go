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
	for i := range 4000 {
		sent.ID = uint64(i)
		o.ReportPlacement(&sent)
		o.ReportPlacement(&router.PlacementEvent{Kind: router.PlacementEnded, Placement: router.Placement{ID: sent.ID}})
	}
	bytes, dropped := o.waiting()
	if bytes > maxOutboxBytes+2*batchBytes || dropped == 0 {
		t.Errorf("%d bytes wait, %d records were dropped", bytes, dropped)
	}
	taken := 0
	for e := o.removeOldest(); e != nil; e = o.removeOldest() {
		if len(e.message(messageHead{1, 2, 3, testTime}, authenticator{})) > maxMessageBytes {
			t.Errorf("message of %d bytes", e.Len())
		}
		taken += e.events
	}
	if int64(taken)+dropped != 8000 {
		t.Errorf("%d records were taken and %d dropped, want 8000 together", taken, dropped)
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
	records, err := parseRecords(rest, func(string) *backends.Backend { return b })
	if err != nil {
		t.Fatal(err)
	}
	last := records[len(records)-1]
	if last.kind != recordInFlight || len(last.inFlight) != 2 {
		t.Fatalf("the last record is %+v", last)
	}
	for _, p := range last.inFlight {
		if p.ID > 1 || p.Prefilled != (p.ID == 1) || p.Backend != b || len(p.Blocks) > 0 {
			t.Errorf("listed %+v", p)
		}
	}
}
