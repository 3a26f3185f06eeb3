package router

import (
	"testing"
	"time"

	"warmroute/backends"
)

// told is what a request was told of being stuck.
type told struct{ times, elsewhere, hung int }

// BackendStalled implements StallListener.
func (w *told) BackendStalled(elsewhere, hung bool) {
	w.times++
	if elsewhere {
		w.elsewhere++
	}
	if hung {
		w.hung++
	}
}

// watch sends a request that may go to any backend, and chooses the first.
func (s *stalls) watch(streams bool) (*Decision, *told) {
	s.t.Helper()
	w := new(told)
	req := ask(s.fleet, 1, 10)
	req.Streams, req.Stalls = streams, w
	s.fleet[0].SetState(backends.Ready)
	for _, b := range s.fleet[1:] {
		b.SetState(backends.Down)
	}
	d := mustPick(s.t, s.r, req)
	for _, b := range s.fleet[1:] {
		b.SetState(backends.Ready)
	}
	return d, w
}

func TestARequestOnABackendThatProducesNothingIsTold(t *testing.T) {
	s := newStalls(t, 2)
	waiting, first := s.watch(true)
	whole, second := s.watch(false)
	answering, third := s.watch(true)
	committed, fourth := s.watch(false)
	answering.RecordFirstEvent()
	committed.Commit()
	s.pass(10*time.Second, nil)
	for name, w := range map[string]*told{"a stream": first, "a whole answer": second} {
		if w.times == 0 || w.elsewhere != w.times || w.hung != 0 {
			t.Errorf("%s: told %+v", name, *w)
		}
	}
	if third.times+fourth.times != 0 {
		t.Error("told of an answer that the client has begun to see")
	}
	s.fleet[1].SetState(backends.Down)
	*first = told{}
	s.pass(time.Second, nil)
	if first.times == 0 || first.elsewhere != 0 {
		t.Errorf("with no other backend: told %+v", *first)
	}
	for _, d := range []*Decision{waiting, whole, answering, committed} {
		d.Release(Outcome{End: ClientDisconnected})
	}
	if n := len(s.r.states[0].health.watched); n != 0 {
		t.Errorf("%d are watched at the end", n)
	}
}

// missed is a scrape of the first backend that came to nothing.
func (s *stalls) missed(late bool) {
	s.clock.advance(2 * time.Second)
	s.r.ScrapeFailed(s.fleet[0], late)
}

func TestAReplicaThatAnswersNoScrapeIsFoundOut(t *testing.T) {
	for _, c := range []struct {
		name  string
		late  []bool // of the scrapes that fail
		found bool
	}{
		{"two late scrapes", []bool{true, true}, false},
		{"three late scrapes", []bool{true, true, true}, true},
		{"refused between", []bool{true, true, false, true, true}, false},
		{"metrics gone", []bool{false, false, false, false, false}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStalls(t, 2)
			d, w := s.watch(false)
			for i, late := range c.late {
				if i == 2 {
					s.fleet[0].SetLoad(nil) // as the poller does
				}
				s.missed(late)
			}
			if (w.times > 0) != c.found {
				t.Errorf("told %+v", *w)
			}
			d.Release(Outcome{End: ClientDisconnected})
		})
	}
}

func TestAHungReplicasRequestsAreToldUntilItIsBack(t *testing.T) {
	s := newStalls(t, 2)
	d, w := s.watch(false)
	s.fleet[0].SetState(backends.Down)
	s.r.ChecksTimedOut(s.fleet[0])
	if w.hung != 1 || w.elsewhere != 1 {
		t.Errorf("told %+v", *w)
	}
	s.missed(true)
	if w.hung != 2 {
		t.Errorf("after another scrape: told %+v", *w)
	}
	s.fleet[0].SetState(backends.Ready)
	s.r.BackendChanged(s.fleet[0])
	s.missed(true)
	if w.times != 2 {
		t.Errorf("when it is back: told %+v", *w)
	}
	d.Release(Outcome{End: Completed})
}
