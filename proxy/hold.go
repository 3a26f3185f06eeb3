package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/router"
)

const (
	// firstRecheck is how long a request waits when all backends refused its
	// connection, until they are asked again: by then the readiness checks know
	// which are down, and the hold queue waits for those.
	firstRecheck = 150 * time.Millisecond
	mostRecheck  = 2 * time.Second
	// retryPatience is how long a request that a replica has answered, if only with
	// an error, waits for another replica to become ready. One that restarts may be
	// about to; after that its client gets the answer that there is.
	retryPatience = 2 * time.Second
)

// pick asks the router for a backend. The request may wait for it in the hold queue.
func (x *exchange) pick() (*router.Decision, error) {
	if x.cancelled() {
		return nil, errCancelled // a free backend would be picked all the same
	}
	for {
		d, err := (*router.Decision)(nil), router.ErrNoneReady
		if !x.mayComeBack() || x.anotherIsReady() {
			d, err = x.ask()
		}
		if !errors.Is(err, router.ErrNoneReady) || !x.mayComeBack() || x.recheckedEnough() {
			return d, err
		}
		// All that were ready refused the connection, or seem to have died, or there is
		// no descriptor to reach them with.
		x.recheck = min(max(2*x.recheck, firstRecheck), mostRecheck)
		if !x.rest(min(x.recheck, x.holdTime()-time.Since(x.whole))) {
			if x.crowded {
				return nil, router.ErrQueueFull
			}
			return nil, x.wait.Err()
		}
		x.askAgain()
	}
}

// holdTime returns how long the request may wait for a backend: as its key says,
// else routing.hold.time; 0 where no request waits.
func (x *exchange) holdTime() time.Duration {
	if x.settings.HoldTime > 0 && x.holder != nil && x.holder.QueueTime > 0 {
		return x.holder.QueueTime
	}
	return x.settings.HoldTime
}

// recheckedEnough reports whether backends that refused the connection are asked
// no more.
func (x *exchange) recheckedEnough() bool {
	return time.Since(x.whole) >= x.holdTime() || x.hasWords() && time.Since(x.spoken) >= retryPatience
}

// patience is how long the next ask may hold the request: what is left of the
// time after the asks before.
func (x *exchange) patience() time.Duration {
	left := x.holdTime() - x.held
	if x.hasWords() && !x.anotherIsReady() {
		left = min(left, retryPatience-time.Since(x.spoken))
	}
	return left
}

// ask is one round of pick, with what becomes of it in the metrics.
func (x *exchange) ask() (*router.Decision, error) {
	x.stopWaiting()
	asked := time.Now()
	ctx := context.Context(x.wait)
	left := x.patience()
	x.input.request.QueueTimeout = max(0, left)
	if left < x.holdTime() { // else the router's own limit will do
		limited, cancel := context.WithTimeout(ctx, left)
		defer cancel()
		ctx = limited
	}
	d, err := x.p.router.Pick(ctx, &x.input.request, x.tried...)
	if err == nil {
		if d.QueueTime > 0 {
			x.wasHeld(metrics.HeldSent, d.QueueTime)
		}
		return d, nil
	}
	waited := time.Since(asked)
	switch {
	case errors.Is(err, router.ErrQueueFull):
		x.wasHeld(metrics.HeldRefused, 0)
	case errors.Is(err, router.ErrQueueTimeout):
		x.wasHeld(metrics.HeldTooLong, waited)
	case errors.Is(err, context.DeadlineExceeded) && x.anotherIsReady():
		err = router.ErrQueueTimeout
		x.wasHeld(metrics.HeldTooLong, waited)
	case errors.Is(err, context.DeadlineExceeded):
		err = router.ErrNoneReady
		x.wasHeld(metrics.HeldNoneReady, waited)
	case errors.Is(err, context.Canceled):
		x.wasHeld(metrics.HeldLeft, waited)
	case x.holdTime() > 0 && waited >= x.holdTime():
		x.wasHeld(metrics.HeldNoneReady, waited)
	}
	return d, err
}

// anotherIsReady reports whether a backend is ready that was not tried.
func (x *exchange) anotherIsReady() bool {
	return slices.ContainsFunc(x.input.request.Backends, func(b *backends.Backend) bool {
		return b.State() == backends.Ready && !slices.Contains(x.tried, b)
	})
}

func (x *exchange) wasHeld(end metrics.HeldEnd, waited time.Duration) {
	x.held += waited
	x.p.metrics.Held(end, waited)
	x.spans.Held(waited, string(end))
}

// waits counts the request among those that wait, and reports whether one more
// may.
func (x *exchange) waits() bool {
	if x.waiting {
		return true
	}
	if x.waiting = x.p.router.AddWaiting(&x.input.request) == nil; !x.waiting {
		x.crowded = true
		x.wasHeld(metrics.HeldRefused, 0)
	}
	return x.waiting
}

func (x *exchange) stopWaiting() {
	if x.waiting {
		x.waiting = false
		x.p.router.RemoveWaiting(&x.input.request)
	}
}

// rest waits, and reports whether there is anybody still to wait for.
func (x *exchange) rest(d time.Duration) bool {
	if !x.waits() {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-x.wait.Done():
		return false
	}
}

// mayComeBack reports whether a backend that was tried may be worth another try
// soon: it refused the connection, or is dead or about to be found so, and will
// be another process when it is back.
func (x *exchange) mayComeBack() bool {
	return len(x.refused) > 0 || slices.ContainsFunc(x.fallen, func(o fallen) bool {
		return slices.Contains(x.tried, o.backend) && (o.backend.State() == backends.Down || time.Since(o.at) < verdict)
	})
}

// askAgain lets those be tried once more.
func (x *exchange) askAgain() {
	x.tried = slices.DeleteFunc(x.tried, func(b *backends.Backend) bool {
		return slices.Contains(x.refused, b) || x.fell(b) && b.State() == backends.Down
	})
	x.refused = x.refused[:0]
}

// notPicked is the answer to a request for which there is no backend.
func (x *exchange) notPicked(err error) *apiError {
	wait := 0
	if all := x.input.request.Backends; x.p.router.CountReady(all) == 0 {
		wait = x.p.unreadyRetryAfter(all)
	} else {
		wait = withJitter(int(x.p.router.RetryAfter(x.input.request.Priority) / time.Second))
	}
	e := unavailable(fmt.Sprintf("no replica that serves this model is ready; try again in %ds", wait))
	switch {
	case errors.Is(err, router.ErrMaxInFlight):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "replicas_full",
			message: fmt.Sprintf("every replica has as many requests as it may (backends[].max_in_flight); try again in %ds", wait)}
	case errors.Is(err, router.ErrQueueFull):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "hold_queue_full",
			message: fmt.Sprintf("as many requests of this priority class as may wait for a replica do (routing.hold); try again in %ds", wait)}
	case errors.Is(err, router.ErrQueueTimeout):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "held_too_long",
			message: fmt.Sprintf("no replica could start this request in %v (routing.hold.time, or queue_time of its key); try again in %ds", x.holdTime(), wait)}
	}
	e.retryAfter = wait
	return e
}
