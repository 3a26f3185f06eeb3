package activity

import (
	"fmt"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

func TestLatestDecisions(t *testing.T) {
	a := New()
	d := &router.Reservation{Backend: &backends.Backend{Name: "b"}, Reason: router.ReasonPrefix}
	for i := range maxDecisions + 3 {
		r := &Request{ID: fmt.Sprint("id-", i)}
		a.Add(r)
		a.RecordDecision(r, d, "m", 2, time.Second)
		a.Remove(r)
	}
	got := a.Decisions()
	if len(got) != maxDecisions || got[0].RequestID != fmt.Sprint("id-", maxDecisions+2) || got[maxDecisions-1].RequestID != "id-3" {
		t.Fatalf("got %d, from %s to %s", len(got), got[0].RequestID, got[len(got)-1].RequestID)
	}
	if first := got[0]; first.Number != maxDecisions+3 || first.Attempt != 2 || first.QueueTime != time.Second || first.Backend != "b" ||
		first.Model != "m" {
		t.Errorf("got %+v", first)
	}
}
