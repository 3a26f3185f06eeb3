package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/recovery"
)

const (
	// exchangeInterval is how often what others have changed is read from a store.
	exchangeInterval = time.Second
	exchangeTimeout  = 3 * time.Second
	// storedTimeout is how long an operator waits until a change is stored: for an exchange in progress and the next.
	storedTimeout      = 2 * exchangeTimeout
	storeLogInterval   = time.Minute // between two lines about the same store
	removeDownInterval = time.Second // between two looks for replicas to forget
)

// Store keeps records outside of this process, by their keys: in a file for the next process, in Redis for other proxies.
type Store interface {
	// ReadRecords returns all records.
	ReadRecords(ctx context.Context) (map[string][]byte, error)
	// WriteRecords replaces some records, and removes others.
	WriteRecords(ctx context.Context, changed map[string][]byte, removed []string) error
}

// storeExchange is what a Fleet knows of a Store. It is used by one goroutine at a time, but awaitChanges by any.
type storeExchange struct {
	store Store
	name  string // in the log
	copy  storedCopy
	logs  rate.Sometimes

	finished backends.Event
	mu       sync.Mutex // guards what follows
	changes  uint64     // of the fleet's records that the last exchange has included
	err      error      // of the last exchange
}

func newStoreExchange(s Store, name string, private bool) *storeExchange {
	return &storeExchange{store: s, name: name, copy: storedCopy{private: private}, logs: rate.Sometimes{Interval: storeLogInterval}}
}

// exchange reads what the store has and calls merge with a copy of it, which returns what the store lacks; that is
// written. Errors are logged, too.
func (e *storeExchange) exchange(ctx context.Context, log *slog.Logger, merge func(*storedCopy) (write map[string][]byte, remove []string,
	err error)) error {
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
		e.logs.Do(func() { log.Warn("added backends and drains not stored", "store", e.name, "err", err) })
	}
	return err
}

// finish records the result of an exchange for awaitChanges.
func (e *storeExchange) finish(changes uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.changes, e.err = changes, err
	e.finished.Notify()
}

// awaitChanges waits until an exchange has included that many changes of the fleet's records, and returns its error.
func (e *storeExchange) awaitChanges(ctx context.Context, changes uint64) error {
	for {
		finished := e.finished.Next() // before looking
		if included, err := e.lastResult(); included >= changes {
			return err
		}
		select {
		case <-finished:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (e *storeExchange) lastResult() (changes uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changes, e.err
}

// WaitStored waits until what was added, removed, drained or undrained before is where the next process finds it: in the
// state file, or else in Redis. The error says why it is not; the fleet has changed nevertheless, and storing it is
// tried again. Without a store WaitStored does nothing.
func (f *Fleet) WaitStored(ctx context.Context) error {
	if len(f.exchanges) == 0 {
		return nil
	}
	e := f.exchanges[0]
	ctx, cancel := context.WithTimeoutCause(ctx, storedTimeout, fmt.Errorf("no result within %v", storedTimeout))
	defer cancel()
	if err := e.awaitChanges(ctx, f.countChanges()); err != nil {
		return fmt.Errorf("not stored in %s, so lost if the proxy ends now: %w", e.name, err)
	}
	return nil
}

// countChanges returns how often the records have changed.
func (f *Fleet) countChanges() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changes
}

// notifyChange has the records written to the stores. f.mu is held.
func (f *Fleet) notifyChange() {
	f.changes++
	f.recordsChanged.Notify()
}

// startExchanges starts the goroutines that exchange records with the stores. f.mu is held.
func (f *Fleet) startExchanges() {
	running := f.running
	for _, e := range f.exchanges {
		f.work.Go(func() {
			f.Panics.RunLoop(running, recovery.AddedBackends, func(ctx context.Context) { f.exchangeRepeatedly(ctx, e) })
			if e.copy.private { // what changed last is written although running is done
				f.Panics.CallAndRecover(recovery.AddedBackends, func() { f.exchangeRecords(context.WithoutCancel(running), e) })
			}
		})
	}
}

// exchangeRecords exchanges records with a store.
func (f *Fleet) exchangeRecords(ctx context.Context, e *storeExchange) {
	changes := f.countChanges() // before looking
	e.finish(changes, e.exchange(ctx, f.Log, f.mergeStored))
}

// exchangeRepeatedly exchanges records with a store after each change here, and every exchangeInterval, until ctx is
// done. What changes during an exchange is written with the next, so that many changes at once need few.
func (f *Fleet) exchangeRepeatedly(ctx context.Context, e *storeExchange) {
	for ctx.Err() == nil {
		changed := f.recordsChanged.Next() // before looking
		f.exchangeRecords(ctx, e)
		timer := time.NewTimer(exchangeInterval)
		select {
		case <-changed:
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
	f.notifyChange() // for the other store
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

// removeDownRepeatedly removes registered replicas that are down for registration.remove_after, until ctx is done.
func (f *Fleet) removeDownRepeatedly(ctx context.Context) {
	for clock.Sleep(ctx, removeDownInterval) {
		f.removeDown(time.Now())
	}
}

// removeDown removes the registered replicas that are down for registration.remove_after. Other proxies, which may reach them,
// keep them.
func (f *Fleet) removeDown(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	timeout := f.config.Registration.RemoveAfter
	if timeout == 0 {
		return
	}
	removed := 0
	for _, r := range f.records.registrations() {
		if f.isDownSince(r.Backend.Name, now.Add(-timeout)) {
			f.records.ignore(replicaKey(r.Backend.Name))
			f.Log.Warn("registered replica removed, down for too long", "backend", r.Backend.Name, "timeout", timeout)
			removed++
		}
	}
	if removed > 0 {
		f.notifyChange()
		f.reconcile()
	}
}

// forgetDrain forgets that a backend that is removed was drained: another may get its name. f.mu is held.
func (f *Fleet) forgetDrain(name string) {
	for key := range f.records.byKey {
		drained, isDrain := key.backendName(drainPrefix)
		if isDrain && (drained == name || strings.HasPrefix(drained, name+"-rank")) {
			f.records.ignore(key)
			f.notifyChange()
		}
	}
}
