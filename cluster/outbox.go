package cluster

import (
	"sync"

	"warmroute/backends"
	"warmroute/proxy/apikey"
	"warmroute/router"
	"warmroute/router/responseindex"
)

const (
	// fullMessageBytes and fullMessageUpdates are from when on a message is complete.
	fullMessageBytes   = 32 << 10
	fullMessageUpdates = maxUpdates / 2
	// maxOutboxBytes bounds what waits while Redis is slow or absent. The oldest messages are dropped.
	maxOutboxBytes = 8 << 20
	maxAddresses   = 1 << 12
	maxFree        = 4 // encoders that keep their memory for the next message
)

// Outbox collects what this proxy tells the others, in the order in which it happened. Nothing
// waits for Redis: it takes memory only, within a bound. It is safe for concurrent use.
type Outbox struct {
	ready chan struct{} // capacity 1: there is something to send

	mu        sync.Mutex // guards what follows
	complete  []*encoder // messages, the oldest first
	current   *encoder
	bytes     int                          // of complete
	dropped   int64                        // messages
	inFlight  map[uint64]router.Placement  // sent and not ended, by ID, without strings and slices
	addresses map[*backends.Backend]string // of the backends, as messages name them
	free      []*encoder
}

// NewOutbox returns an empty one. A Router reports to it, and so do a responseindex.Index and an apikey.Set.
func NewOutbox() *Outbox {
	o := &Outbox{ready: make(chan struct{}, 1), inFlight: map[uint64]router.Placement{}, addresses: map[*backends.Backend]string{}}
	o.current = newEncoder(o.addressOf)
	return o
}

// ReportPlacement implements router.PlacementReporter.
func (o *Outbox) ReportPlacement(v *router.PlacementEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch v.Kind {
	case router.PlacementSent:
		p := v.Placement
		p.Model, p.Adapter, p.Blocks, p.Forks = "", "", nil, nil
		o.inFlight[v.ID] = p
	case router.PlacementPrefilled:
		if p, ok := o.inFlight[v.ID]; ok {
			p.Prefilled = true
			o.inFlight[v.ID] = p
		}
	case router.PlacementEnded:
		delete(o.inFlight, v.ID)
	}
	o.current.addEvent(v)
	o.finishUpdate()
}

// addressOf returns the address of a backend. o.mu is held.
func (o *Outbox) addressOf(b *backends.Backend) string {
	address, ok := o.addresses[b]
	if !ok {
		if len(o.addresses) >= maxAddresses { // of backends that were removed
			clear(o.addresses)
		}
		address = b.Address()
		o.addresses[b] = address
	}
	return address
}

// ReportResponse implements responseindex.Reporter.
func (o *Outbox) ReportResponse(id string, e responseindex.Entry) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.current.addResponse(updateResponse, &storedResponse{id, e.Backend, e.Owner})
	o.finishUpdate()
}

// ReportForgotten implements responseindex.Reporter.
func (o *Outbox) ReportForgotten(id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.current.addResponse(updateForgotten, &storedResponse{id: id})
	o.finishUpdate()
}

func (o *Outbox) addUsage(charged []apikey.Charge) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range charged {
		o.current.addKeyUsage(&keyUsage{c.Name, c.Requests, c.Tokens})
		o.finishUpdate()
	}
}

// addInFlight adds all placements that have not ended, at their place between the events.
func (o *Outbox) addInFlight() {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.current
	e.start(updateInFlight)
	n := e.Count(len(o.inFlight), maxInFlight, minAccountBytes)
	for _, p := range o.inFlight {
		if n--; n < 0 {
			break
		}
		e.account(&p)
	}
	o.completeMessage() // there is one in a message
	o.signalReady()
}

func (o *Outbox) addLeaving() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.current.start(updateLeaving)
	o.finishUpdate()
}

// finishUpdate follows each update. o.mu is held.
func (o *Outbox) finishUpdate() {
	if e := o.current; e.Len() >= fullMessageBytes || e.events >= fullMessageUpdates {
		o.completeMessage()
	}
	o.signalReady()
}

// completeMessage begins the next message. o.mu is held.
func (o *Outbox) completeMessage() {
	o.complete, o.bytes = append(o.complete, o.current), o.bytes+o.current.Len()
	o.current = o.newEncoder()
	o.dropBeyondBound()
}

// newEncoder returns an empty encoder. o.mu is held.
func (o *Outbox) newEncoder() *encoder {
	if n := len(o.free); n > 0 {
		e := o.free[n-1]
		o.free = o.free[:n-1]
		return e
	}
	return newEncoder(o.addressOf)
}

// recycle takes back an encoder of removeOldest.
func (o *Outbox) recycle(e *encoder) {
	if cap(e.Data) > 2*fullMessageBytes {
		return
	}
	e.reset()
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.free) < maxFree {
		o.free = append(o.free, e)
	}
}

// dropBeyondBound drops the oldest messages beyond maxOutboxBytes. o.mu is held.
func (o *Outbox) dropBeyondBound() {
	for o.bytes > maxOutboxBytes && len(o.complete) > 1 {
		o.bytes -= o.complete[0].Len()
		o.dropped++
		o.complete[0] = nil
		o.complete = o.complete[1:]
	}
}

func (o *Outbox) signalReady() {
	select {
	case o.ready <- struct{}{}:
	default:
	}
}

// removeOldest removes and returns the oldest message, complete or not; nil if there is nothing.
func (o *Outbox) removeOldest() *encoder {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.complete) > 0 {
		e := o.complete[0]
		o.complete[0] = nil
		o.complete, o.bytes = o.complete[1:], o.bytes-e.Len()
		return e
	}
	if o.current.empty() {
		return nil
	}
	e := o.current
	o.current = o.newEncoder()
	return e
}

// waiting returns how many bytes wait, and how many messages were dropped.
func (o *Outbox) waiting() (bytes int, dropped int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes + o.current.Len(), o.dropped
}
