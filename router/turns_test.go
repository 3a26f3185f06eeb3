package router

import (
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

// turnsLoad is two tenants whose clients each send a request after the response to the one before, to one backend that
// prefills 8,000 tokens a second and does nothing else.
type turnsLoad struct {
	t       *testing.T
	r       *Router
	c       *clock
	fleet   []*backends.Backend
	busy    time.Time // until when the backend prefills
	served  map[uint64]int
	running []*turnInFlight
}

type turnInFlight struct {
	client      func() *Request
	tenant      uint64
	reservation *Reservation
	end         time.Time
}

const turnBlocks = 100 // 0.8 s of the backend

// playTwoTenants plays the clients of tenant 1, of which request returns the next request, beside those of tenant 2, whose
// requests have nothing in common. It returns how many requests of each were served.
func playTwoTenants(t *testing.T, clients int, request func(fleet []*backends.Backend, client, turn int) *Request) map[uint64]int {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue, func(o *Options) { o.Queue.BusyTimeout = 10 * time.Minute })
	l := &turnsLoad{t: t, r: r, c: c, fleet: fleet, served: map[uint64]int{}}
	key := 1 << 20
	for i := range clients {
		turn := 0
		l.send(&turnInFlight{tenant: 1, client: func() *Request {
			turn++
			return request(fleet, i, turn)
		}})
		l.send(&turnInFlight{tenant: 2, client: func() *Request {
			key++
			return turnOf(ask(fleet, key, turnBlocks), uint64(key), prompt.TurnFirst)
		}})
	}
	for end := c.now.Add(90 * time.Second); c.now.Before(end); {
		c.advance(TickInterval)
		l.endDue()
		r.Tick()
	}
	return l.served
}

func (l *turnsLoad) send(f *turnInFlight) {
	req := f.client()
	req.Tenant = f.tenant
	l.r.Submit(req, func(d *Reservation, err error) {
		if err != nil {
			l.t.Error(err)
			return
		}
		l.busy = maxTime(l.busy, l.c.now).Add(time.Duration(d.entry.Prediction.Uncached / testPrefillRate * float64(time.Second)))
		f.reservation, f.end = d, l.busy
		l.running = append(l.running, f)
	})
}

func (l *turnsLoad) endDue() {
	running := l.running
	l.running = nil
	for _, f := range running {
		if f.end.After(l.c.now) {
			l.running = append(l.running, f)
			continue
		}
		f.reservation.RecordFirstEvent()
		f.reservation.Release(Outcome{End: Completed, OutputTokens: 1})
		l.served[f.tenant]++
		l.send(f)
	}
}

// TestTurnsTakeNothingFromOtherTenants compares what another tenant is served beside one whose requests continue each other,
// or look as if they did, with what it is served beside one whose requests do not.
func TestTurnsTakeNothingFromOtherTenants(t *testing.T) {
	const clients = 20
	for name, request := range map[string]func(fleet []*backends.Backend, client, turn int) *Request{
		"few-shot prompts with one first message": func(fleet []*backends.Backend, client, turn int) *Request {
			return turnOf(ask(fleet, 1+client*1000+turn, turnBlocks), 1, prompt.TurnLater)
		},
		"one conversation for all requests": func(fleet []*backends.Backend, client, turn int) *Request {
			req := turnOf(ask(fleet, 1+client*1000+turn, turnBlocks), uint64(turn), prompt.TurnLater)
			req.Conversation = 1
			return req
		},
		"conversations that grow": func(fleet []*backends.Backend, client, turn int) *Request {
			req := ask(fleet, 1+client, turn*turnBlocks)
			return turnOf(req, uint64(1+client), prompt.TurnLater)
		},
		"one conversation of conversations that grow": func(fleet []*backends.Backend, client, turn int) *Request {
			req := ask(fleet, 1+client, turn*turnBlocks)
			req.Conversation = 1
			return turnOf(req, uint64(1+client), prompt.TurnLater)
		},
		"one message of the assistant in each": func(fleet []*backends.Backend, client, turn int) *Request {
			return turnOf(ask(fleet, 1+client*1000+turn, turnBlocks), uint64(1+client), prompt.TurnLater)
		},
	} {
		t.Run(name, func(t *testing.T) {
			served := playTwoTenants(t, clients, request)
			alike := playTwoTenants(t, clients, func(fleet []*backends.Backend, client, turn int) *Request {
				req := request(fleet, client, turn)
				req.Turn = prompt.TurnFirst
				return req
			})
			t.Logf("served %v, and without later turns %v", served, alike)
			if float64(served[2]) < 0.9*float64(alike[2]) {
				t.Errorf("the other tenant was served %d requests, and %d where no request is a later turn", served[2], alike[2])
			}
		})
	}
}
