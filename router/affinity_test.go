package router

import (
	"fmt"
	"testing"

	"warmroute/backends"
)

// Guards are per candidate: prompts go back to those who hold them, however busy
// one other backend is, and only what that one holds is served elsewhere.
func TestOneHotBackendDoesNotSwitchAffinityOffForTheRest(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	holders := map[int]*backends.Backend{}
	for key := range 40 {
		d := mustPick(t, r, ask(fleet, key, 40))
		d.RecordFirstEvent()
		holders[key] = d.Backend
		defer d.Release(Outcome{End: Completed, AnswerTokens: 100}) // all at once at the end, so that they spread
	}
	hot := fleet[0]
	hot.SetLoad(&backends.Load{QueuesKnown: true, Running: 500, Waiting: 200, ScrapedAt: c.now})
	seen := map[*backends.Backend]int{}
	for key, holder := range holders {
		d := mustPick(t, r, ask(fleet, key, 41))
		switch {
		case holder == hot && d.Backend == hot:
			t.Errorf("prompt %d went to the backend with 700 requests of others", key)
		case holder != hot && d.Backend != holder:
			t.Errorf("prompt %d went to %s, though %s holds it and is not busy", key, d.Backend.Name, holder.Name)
		}
		seen[holder]++
		d.Release(Outcome{End: NotProcessed})
	}
	if len(seen) != 4 {
		t.Fatalf("the prompts are on %d backends only", len(seen))
	}
}

// When everybody shares one system prompt, everybody's requests are spread over
// everybody who may come to hold it.
func TestAPromptThatAllShareIsNotPinnedToItsFirstHolder(t *testing.T) {
	r, fleet, _ := newFleet(t, 8, "prefix")
	const requests = 160
	for i := range requests {
		req := ask(fleet, 1, 32) // 8 KB shared
		own := ask(fleet, 100+i, 4)
		req.Blocks, req.Bytes = append(req.Blocks, own.Blocks...), req.Bytes+own.Bytes
		mustPick(t, r, req).RecordFirstEvent()
	}
	counts := ""
	for _, b := range fleet {
		n := b.InFlight.Load()
		counts += fmt.Sprint(" ", n)
		if mean := requests / len(fleet); n < int64(mean)/2 || n > int64(mean)*3/2 {
			t.Errorf("%s has %d in flight, the mean is %d", b.Name, n, mean)
		}
	}
	t.Log("in flight:", counts)
}
