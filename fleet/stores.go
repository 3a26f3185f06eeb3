package fleet

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"warmroute/clock"
	"warmroute/recovery"
)

const (
	// exchangeInterval is how often what others have changed is read from a store.
	exchangeInterval = time.Second
	// exchangeDelay is how long a change waits for others, which are written with it.
	exchangeDelay    = 20 * time.Millisecond
	exchangeTimeout  = 3 * time.Second
	storeLogInterval = time.Minute // between two lines about the same store
	forgetInterval   = time.Second // between two looks for replicas to forget
)

// Store keeps records outside of this process, by their keys: in a file for the next process, in Redis for other proxies.
type Store interface {
	// ReadRecords returns all records.
	ReadRecords(ctx context.Context) (map[string][]byte, error)
	// WriteRecords replaces some records, and removes others.
	WriteRecords(ctx context.Context, changed map[string][]byte, removed []string) error
}

// storeExchange is what a Fleet knows of a Store. It is used by one goroutine at a time.
type storeExchange struct {
	store Store
	name  string // in the log
	copy  storedCopy
	logs  rate.Sometimes
}

func newStoreExchange(s Store, name string, private bool) *storeExchange {
	return &storeExchange{store: s, name: name, copy: storedCopy{private: private}, logs: rate.Sometimes{Interval: storeLogInterval}}
}

// exchange reads what the store has and calls merge with a copy of it, which returns what the store lacks; that is
// written. Errors are logged.
func (e *storeExchange) exchange(ctx context.Context, log *slog.Logger, merge func(*storedCopy) (write map[string][]byte, remove []string, err error)) {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	values, err := e.store.ReadRecords(ctx)
	if err == nil {
		if invalid := e.copy.update(values); invalid != nil {
			log.Warn("record of a replica ignored", "store", e.name, "err", invalid)
		}
		var write map[string][]byte
		var remove []string
		if write, remove, err = merge(&e.copy); err == nil && len(write)+len(remove) > 0 {
			err = e.store.WriteRecords(ctx, write, remove)
		}
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		e.logs.Do(func() { log.Warn("added replicas and drains not stored", "store", e.name, "err", err) })
	}
}

// startExchanges starts the goroutines that exchange records with the stores. f.mu is held.
func (f *Fleet) startExchanges() {
	running := f.running
	for _, e := range f.exchanges {
		f.work.Go(func() {
			f.Panics.RunLoop(running, recovery.Records, func(ctx context.Context) { f.exchangeRepeatedly(ctx, e) })
			if e.copy.private { // what changed last is written although running is done
				e.exchange(context.WithoutCancel(running), f.Log, f.mergeStored)
			}
		})
	}
}

// exchangeRepeatedly exchanges records with a store after each change here, and every exchangeInterval, until ctx is done.
func (f *Fleet) exchangeRepeatedly(ctx context.Context, e *storeExchange) {
	for ctx.Err() == nil {
		changed := f.recordsChanged.Next() // before looking
		e.exchange(ctx, f.Log, f.mergeStored)
		timer := time.NewTimer(exchangeInterval)
		select {
		case <-changed:
			clock.Sleep(ctx, exchangeDelay)
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// mergeStored applies what a store has, changes the fleet accordingly, and returns what to write to the store.
func (f *Fleet) mergeStored(c *storedCopy) (write map[string][]byte, remove []string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	applied, write, remove, err := f.records.mergeStored(c, time.Now())
	if len(applied) == 0 {
		return write, remove, err
	}
	f.Log.Info("replicas and drains changed by another proxy", "changes", len(applied))
	f.recordsChanged.Notify() // for the other store
	f.reconcile()
	for _, key := range applied {
		if name, isDrain := key.backendName(drainPrefix); isDrain {
			f.applyDrain(name)
		} else if name, isReplica := key.backendName(replicaPrefix); isReplica {
			f.retireRemoved(name)
		}
	}
	return write, remove, err
}

// applyDrain drains or undrains the backend of a name, or the server of that name with its ranks, as recorded. f.mu is held.
func (f *Fleet) applyDrain(name string) {
	switch b := f.registry.Find(name); {
	case b == nil:
	case f.records.isDrained(name):
		b.Drain()
	default:
		b.Undrain()
	}
}

// forgetRepeatedly drops registered replicas that are down for registration.forget, until ctx is done.
func (f *Fleet) forgetRepeatedly(ctx context.Context) {
	for clock.Sleep(ctx, forgetInterval) {
		f.forgetDown(time.Now())
	}
}

// forgetDown drops the registered replicas that are down for registration.forget. Other proxies, which may reach them,
// keep them.
func (f *Fleet) forgetDown(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	timeout := f.config.Registration.Forget
	if timeout == 0 {
		return
	}
	forgotten := 0
	for _, r := range f.records.registrations() {
		if f.isDownSince(r.Backend.Name, now.Add(-timeout)) {
			f.records.ignore(replicaKey(r.Backend.Name))
			f.Log.Warn("registered replica removed, down for too long", "backend", r.Backend.Name, "timeout", timeout)
			forgotten++
		}
	}
	if forgotten > 0 {
		f.recordsChanged.Notify()
		f.reconcile()
	}
}

// forgetDrain forgets that a backend that is removed was drained: another may get its name. f.mu is held.
func (f *Fleet) forgetDrain(name string) {
	for key := range f.records.byKey {
		drained, isDrain := key.backendName(drainPrefix)
		if isDrain && (drained == name || strings.HasPrefix(drained, name+"-rank")) {
			f.records.ignore(key)
			f.recordsChanged.Notify()
		}
	}
}
