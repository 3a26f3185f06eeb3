// Package control carries out what operators want done to replicas, over vLLM's control API: sleep and wake,
// pause and resume, reset the prefix cache, load and unload adapters.
package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sync/errgroup"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/recovery"
)

const (
	// maxConcurrent bounds on how many replicas an action is carried out at a time.
	maxConcurrent = 128
	// idleCheckInterval is how often a backend is checked for requests in flight.
	idleCheckInterval = 10 * time.Millisecond
)

var errBusy = errors.New("another action on this replica is in progress: try again when it has finished")

// Controller carries out actions on backends. Set the fields before its first use. Safe for concurrent use.
type Controller struct {
	// StateChanged has the router read the backend's state: requests that are routed after it returns do not
	// go to a backend that was suspended before.
	StateChanged func(*backends.Backend)
	// CacheReset forgets what a backend's replica held.
	CacheReset func(*backends.Backend)
	Panics     recovery.Reporter // of actions

	mu   sync.Mutex
	busy map[string]bool // addresses of the replicas on which an action is in progress
}

// Result is the outcome of an action on one replica.
type Result struct {
	Backend string  `json:"backend"`
	OK      bool    `json:"ok"`
	Status  int     `json:"status,omitempty"` // of the replica's last response; 0: there was none
	Error   string  `json:"error,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Run carries out an action on the replicas of the backends, on all at the same time, and returns the results
// in the order of the list, one for a replica of whose ranks several are in it. One that fails does not affect the
// others. When ctx is done, no more calls are made; a call that has been made is waited for, since the replica may
// carry it out.
func (c *Controller) Run(ctx context.Context, r *Request, list []*backends.Backend) []Result {
	var servers []*backends.Backend
	for _, b := range list {
		if !slices.Contains(servers, b.Server()) {
			servers = append(servers, b.Server())
		}
	}
	results := make([]Result, len(servers))
	var group errgroup.Group
	group.SetLimit(maxConcurrent)
	for i, b := range servers {
		group.Go(func() error {
			if c.Panics.CallAndRecover(recovery.Handler, func() { results[i] = c.runOnReplica(ctx, r, b) }) {
				results[i] = Result{Backend: b.Name, Error: "the proxy failed: its log says why; what the replica has done is unknown"}
			}
			return nil
		})
	}
	_ = group.Wait() // no function fails
	return results
}

func (c *Controller) runOnReplica(ctx context.Context, r *Request, b *backends.Backend) Result {
	started := time.Now()
	t := &target{Controller: c, Backend: b, timeout: time.Duration(r.Timeout)}
	err := t.runExclusively(ctx, r.Action)
	result := Result{Backend: b.Name, OK: err == nil, Status: t.status, Seconds: time.Since(started).Round(time.Millisecond).Seconds()}
	if err != nil {
		result.Error = err.Error()
	}
	return result
}

// target is one replica on which an action is in progress.
type target struct {
	*Controller
	*backends.Backend               // that of the server, not of a rank
	timeout           time.Duration // of a call
	status            int           // of the last response
}

// runExclusively carries out an action. It fails if another one is in progress on the replica.
func (t *target) runExclusively(ctx context.Context, a Action) error {
	address := t.Address()
	if !t.setBusy(address) {
		return errBusy
	}
	defer t.clearBusy(address)
	return a.run(ctx, t)
}

func (c *Controller) setBusy(address string) (wasIdle bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy[address] {
		return false
	}
	if c.busy == nil {
		c.busy = map[string]bool{}
	}
	c.busy[address] = true
	return true
}

func (c *Controller) clearBusy(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, address)
}

// setSuspension sets the backend's Suspension. When it returns, the router knows it.
func (t *target) setSuspension(s backends.Suspension) {
	t.SetSuspension(s)
	for _, part := range t.Parts() {
		t.StateChanged(part)
	}
}

// recordCacheReset forgets what the replica held.
func (t *target) recordCacheReset() {
	for _, part := range t.Parts() {
		t.CacheReset(part)
	}
}

// suspendAndDrain suspends the backend and waits until none of its requests is in flight. If that takes longer
// than wait, or ctx is done, it restores the suspension before and returns an error.
func (t *target) suspendAndDrain(ctx context.Context, s backends.Suspension, wait time.Duration) error {
	before := t.Suspension()
	t.setSuspension(s)
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	ticks := time.NewTicker(idleCheckInterval)
	defer ticks.Stop()
	var err error
	for !t.AllIdle() && err == nil {
		select {
		case <-ticks.C:
		case <-timeout.C:
			err = fmt.Errorf("requests in flight after %v: %d: wait longer, or use force", wait, t.CountInFlight())
		case <-ctx.Done():
			err = fmt.Errorf("%d requests are in flight: %w", t.CountInFlight(), context.Cause(ctx))
		}
	}
	if err != nil {
		t.setSuspension(before)
	}
	return err
}

// call sends a call to the replica and checks the response. It is not begun when ctx is done, but once begun it
// ends only with the timeout.
func (t *target) call(ctx context.Context, c vllm.Call) error {
	t.status = 0
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	timeout := fmt.Errorf("%s: no response within %v", c.Path, t.timeout)
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), t.timeout, timeout)
	defer cancel()
	resp, err := t.Post(ctx, c, vllm.MaxCallResponseBytes)
	if errors.Is(err, timeout) {
		return timeout
	}
	if resp != nil {
		defer fasthttp.ReleaseResponse(resp)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.Path, err)
	}
	t.status = resp.StatusCode()
	return c.Check(t.status, resp.Body())
}

// callSuspended sends a call that stops the engine, for which the backend was suspended, and sets the backend's
// suspension to onSuccess or onFailure. It is onSuccess also if it is unknown whether the replica carries the call out,
// since requests might wait there for long.
func (t *target) callSuspended(ctx context.Context, c vllm.Call, onFailure, onSuccess backends.Suspension) error {
	if ctx.Err() != nil {
		t.setSuspension(onFailure)
		return context.Cause(ctx)
	}
	err := t.call(context.WithoutCancel(ctx), c)
	switch {
	case err == nil:
		t.setSuspension(onSuccess)
	case t.status == 0 && !isDialError(err):
		t.setSuspension(onSuccess)
		err = fmt.Errorf("%w: it may happen later, so no requests are sent to the replica until wake or resume", err)
	default:
		t.setSuspension(onFailure)
	}
	return err
}

// isDialError reports whether no connection could be opened, so that nothing was sent.
func isDialError(err error) bool {
	e, ok := errors.AsType[*net.OpError](err)
	return ok && e.Op == "dial"
}
