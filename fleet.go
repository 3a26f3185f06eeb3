package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/metrics"
	"warmroute/router"
)

const (
	// joinPatience is how long backends that leave go on taking requests until those
	// that join with them are ready.
	joinPatience = 5 * time.Second
	fleetLook    = 10 * time.Millisecond // between two looks at what a change waits for
)

// fleet makes the backends that run those of the configuration, while requests
// pass: none is lost for it. Safe for concurrent use.
type fleet struct {
	registry *backends.Registry
	router   *router.Router
	checker  *backends.Checker
	poller   *backends.Poller
	metrics  *metrics.Metrics
	log      *slog.Logger
	left     func(*backends.Backend) // told of a backend that nobody has any more

	changing sync.Mutex      // guards what follows
	running  context.Context // of start; nil: not yet, or it ends
	work     sync.WaitGroup  // of the goroutines
	members  []*member
	patience time.Duration // that a backend which leaves has for its last requests
}

// newFleet makes the backends of a configuration. Nothing runs before start.
func newFleet(c *config.Config, log *slog.Logger) (*fleet, error) {
	f := &fleet{log: log, patience: c.Timeouts.Shutdown}
	var list []*backends.Backend
	for _, b := range c.Backends {
		m, err := newMember(b, transportOptionsOf(c))
		if err != nil {
			return nil, err
		}
		f.members = append(f.members, m)
		list = append(list, m.backend)
	}
	var err error
	f.registry, err = backends.NewRegistry(list)
	return f, err
}

// start has the backends checked and polled until ctx is done. It returns what
// waits for that, and for the end of all that the fleet does then.
func (f *fleet) start(ctx context.Context) (ends func()) {
	f.changing.Lock()
	defer f.changing.Unlock()
	f.running = ctx
	for _, m := range f.members {
		f.follow(m)
	}
	return func() {
		<-ctx.Done()
		f.changing.Lock()
		f.running = nil // what a change begins, it begins before this or not at all
		f.changing.Unlock()
		f.work.Wait()
		f.changing.Lock()
		defer f.changing.Unlock()
		for _, m := range f.members {
			m.closeIdle()
		}
	}
}

// apply makes the fleet that of a configuration: backends that are new join,
// those that are missing drain and leave, and the terms of the others change. A
// backend is the same as long as its name and URL are. It does not wait for
// backends to become ready, or to be drained. Not to be called before start.
//
// On an error nothing has changed, unless the configuration was not checked: of
// two backends that cannot be there together the first joins.
func (f *fleet) apply(c *config.Config) error {
	f.changing.Lock()
	defer f.changing.Unlock()
	var stay, join []*member
	changed := map[*member]*member{}
	for _, b := range c.Backends {
		fresh, err := newMember(b, transportOptionsOf(c))
		if err != nil {
			return err
		}
		if at := slices.IndexFunc(f.members, fresh.replaces); at >= 0 {
			stay = append(stay, f.members[at])
			changed[f.members[at]] = fresh
		} else {
			join = append(join, fresh)
		}
	}
	f.patience = c.Timeouts.Shutdown
	for m, fresh := range changed {
		m.become(fresh)
	}
	var leave []*member
	for _, m := range f.members {
		if slices.Contains(stay, m) {
			continue
		}
		leave = append(leave, m)
		// Whose name or address another has goes at once: two cannot have it.
		if slices.ContainsFunc(join, m.clashes) || slices.ContainsFunc(stay, m.clashes) {
			m.backend.Retire()
		}
	}
	return f.exchange(leave, join)
}

// exchange lets some leave, unless they do so already, and others join. f.changing
// is held.
func (f *fleet) exchange(leave, join []*member) error {
	var faults []error
	for _, m := range join {
		if err := f.registry.Add(m.backend); err != nil {
			faults = append(faults, fmt.Errorf("backend %s: %w", m.backend.Name, err))
			continue
		}
		f.router.AddBackend(m.backend)
		m.joined = time.Now()
		f.members = append(f.members, m)
		f.follow(m)
		f.log.Info("backend added", "backend", m.backend.Name)
	}
	for _, m := range leave {
		if f.running == nil || m.leaving != nil {
			continue
		}
		var ctx context.Context
		ctx, m.leaving = context.WithCancel(f.running)
		f.work.Go(func() { f.leave(ctx, m) })
	}
	return errors.Join(faults...)
}

// follow checks and polls a backend until it leaves. f.changing is held.
func (f *fleet) follow(m *member) {
	if f.running == nil {
		return
	}
	ctx, stop := context.WithCancel(f.running)
	m.stop = stop
	for _, follow := range []func(context.Context, *backends.Backend){f.checker.Watch, f.poller.Watch} {
		m.followed.Add(1)
		f.work.Go(func() { defer m.followed.Done(); follow(ctx, m.backend) })
	}
}

// leave drains a backend and then removes it, unless ctx ends before: the
// configuration has it again.
func (f *fleet) leave(ctx context.Context, m *member) {
	b := m.backend
	wait(ctx, joinPatience, f.joined)
	f.changing.Lock()
	end := time.Now().Add(f.patience)
	if ctx.Err() == nil {
		b.Retire()
		f.log.Info("backend leaves", "backend", b.Name, "in_flight", b.InFlight.Load(), "limit", f.patience)
	}
	f.changing.Unlock()
	wait(ctx, time.Until(end), b.Idle)

	f.changing.Lock()
	if ctx.Err() != nil {
		f.changing.Unlock()
		return
	}
	m.leaving()
	f.members = slices.DeleteFunc(f.members, func(other *member) bool { return other == m })
	f.changing.Unlock()
	f.remove(m, end)
}

// joined reports whether no backend is awaited that has joined, be it with a later
// change than the one that waits.
func (f *fleet) joined() bool {
	f.changing.Lock()
	defer f.changing.Unlock()
	return !slices.ContainsFunc(f.members, func(m *member) bool {
		return m.leaving == nil && m.backend.State() == backends.Down && time.Since(m.joined) < joinPatience
	})
}

// remove takes away what there is of a backend. What it has in flight at the end
// is cut off.
func (f *fleet) remove(m *member, end time.Time) {
	b := m.backend
	m.stop()
	m.followed.Wait()
	f.router.RemoveBackend(b)
	// A request may have been given to it in the moment in which it was retired;
	// from now on none can be.
	wait(context.Background(), time.Until(end), b.Idle)
	cut := b.InFlight.Load() + b.NoEngineInFlight.Load()
	m.close()
	f.registry.Remove(b)
	if f.registry.Find(b.Name) == nil {
		f.metrics.DeleteBackend(b.Name)
	}
	f.left(b)
	f.log.Info("backend removed", "backend", b.Name, "cut_off", cut)
}

// wait looks until something is so, ctx is done, or it took too long.
func wait(ctx context.Context, limit time.Duration, so func() bool) {
	end := time.NewTimer(limit)
	defer end.Stop()
	looks := time.NewTicker(fleetLook)
	defer looks.Stop()
	for !so() {
		select {
		case <-ctx.Done():
			return
		case <-end.C:
			return
		case <-looks.C:
		}
	}
}
