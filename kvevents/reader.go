// Package kvevents makes the router's picture of the replicas' caches exact where they publish KV
// events: it reads the events of each replica, and relates the KV blocks that they name to the
// blocks of prompts that the router's index knows.
package kvevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/kvevents/wire"
	"warmroute/recovery"
	"warmroute/router"
)

const (
	discoveryTimeout = 5 * time.Second
	settingsInterval = 5 * time.Second // after which a changed setting is noticed at the latest
	settleInterval   = 100 * time.Millisecond
)

// Reader reads the KV events of the backends that publish them. As a prometheus.Collector it exports
// what it received. Safe for concurrent use.
type Reader struct {
	registry *backends.Registry
	fleet    *Fleet
	log      *slog.Logger
	panics   recovery.Reporter
	listener *listener

	ignored, refused *prometheus.CounterVec // what publishers send to listener, and their connections

	mu       sync.Mutex
	readings map[*backends.Backend]*reading
	lookedUp map[*backends.Backend]bool // those with a reading, and others of which is known that they have none
	changed  backends.Event             // of these two
}

// reading reads the events of one backend.
type reading struct {
	sources     []wire.Source
	follower    *Follower
	subscribers []*wire.Subscriber
	stop        func()          // waits until all is stopped
	stopped     <-chan struct{} // closed when that begins
}

// NewReader returns a Reader, which reads nothing until Watch is called. Publishers can connect to sockets: a data-parallel engine to
// the one at its rank.
func NewReader(
	registry *backends.Registry, router *router.Router, log *slog.Logger, panics recovery.Reporter, sockets []net.Listener,
) *Reader {
	r := &Reader{
		registry: registry, fleet: NewFleet(router), log: log, panics: panics,
		readings: map[*backends.Backend]*reading{}, lookedUp: map[*backends.Backend]bool{},
	}
	r.listener = newListener(r, sockets)
	r.ignored, r.refused = newListenerCounters()
	return r
}

// Serve accepts the connections of publishers until ctx is done. Then it closes the sockets and all connections, and waits for
// what it started.
func (r *Reader) Serve(ctx context.Context) { r.listener.serve(ctx) }

// Watch reads the events of a server until ctx is done, for each of its Parts those of its own engines. What it
// publishes is looked up whenever it becomes ready, since it may be another process then, and when its settings change.
func (r *Reader) Watch(ctx context.Context, server *backends.Backend) {
	lookups := map[*backends.Backend]*sourceLookup{}
	defer func() {
		for b := range lookups {
			r.forgetBackend(ctx, b)
		}
	}()
	ticks := time.NewTicker(settingsInterval)
	defer ticks.Stop()
	for {
		changed := r.registry.StateChanged()
		parts := server.Parts()
		for b := range lookups {
			if !slices.Contains(parts, b) {
				r.forgetBackend(ctx, b)
				delete(lookups, b)
			}
		}
		for _, b := range parts {
			if lookups[b] == nil {
				lookups[b] = &sourceLookup{}
			}
			r.updateSources(ctx, b, lookups[b])
		}
		select {
		case <-changed:
		case <-ticks.C:
		case <-ctx.Done():
			return
		}
	}
}

// sourceLookup is with which settings the sources of a backend were found, and with which that failed last.
type sourceLookup struct {
	found, failed sourceSettings
}

// updateSources looks up the sources of a backend if its settings have changed, or it is ready again, and reads its
// events from them.
func (r *Reader) updateSources(ctx context.Context, b *backends.Backend, l *sourceLookup) {
	if b.State() != backends.Ready {
		l.found = sourceSettings{}
		return
	}
	s := readSourceSettings(b)
	if s == l.found {
		return
	}
	sources, err := findSources(ctx, b, s, r.listener.ports())
	if err != nil && ctx.Err() == nil && s != l.failed {
		l.failed = s
		r.log.Warn("KV event sources not found", "backend", b.Name, "err", err)
	}
	if err == nil || len(sources) > 0 {
		l.found = s
		r.replaceSources(ctx, b, sources, s.engines)
	} // else it is tried again
}

// sourceSettings are what the sources of a backend depend on.
type sourceSettings struct {
	events, replay string
	engines        int
	refuseLocal    bool
}

func readSourceSettings(b *backends.Backend) sourceSettings {
	o, engines := b.Options(), 1
	if l := b.Load(); l != nil {
		engines = max(1, l.Engines)
	}
	return sourceSettings{o.KVEvents, o.KVReplay, engines, o.RefuseLocal}
}

// findSources returns where a replica publishes its events, or those of one of its ranks; nothing if it does not. It
// may return some of the sources and an error about others. ours are the ports to which publishers can connect.
func findSources(ctx context.Context, b *backends.Backend, s sourceSettings, ours wire.Ports) ([]wire.Source, error) {
	rank, isRank := b.Engine()
	if isRank {
		s.engines = rank + 1
	}
	sources, err := findServerSources(ctx, b, s, ours)
	for i := range sources {
		sources[i].RefuseLocal = s.refuseLocal
	}
	if !isRank {
		return sources, err
	}
	for _, source := range sources {
		if source.Rank == rank {
			source.Rank = 0 // the only engine of this backend
			return []wire.Source{source}, nil
		}
	}
	return nil, err
}

// findServerSources is findSources for all engines of the replica.
func findServerSources(ctx context.Context, b *backends.Backend, s sourceSettings, ours wire.Ports) ([]wire.Source, error) {
	host := b.Host()
	switch s.events {
	case backends.KVEventsOff, "":
		return nil, nil
	case backends.KVEventsAuto:
	case backends.KVEventsListen:
		if ours.Count == 0 {
			return nil, errors.New("kv_events of the backend is listen: set kv_events.listen as well")
		}
		return wire.AwaitedSources(s.replay, host, s.engines)
	default:
		return wire.ConfiguredSources(s.events, s.replay, "", host, s.engines)
	}
	ctx, cancel := context.WithTimeout(ctx, discoveryTimeout)
	defer cancel()
	res, err := b.Get(ctx, "/kv_event_sources", "application/json", "", wire.MaxSourcesBytes)
	if res == nil {
		return nil, fmt.Errorf("/kv_event_sources: %w", err)
	}
	defer fasthttp.ReleaseResponse(res)
	switch status := res.StatusCode(); {
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed: // of a version without it
		if ours.Count > 0 {
			return wire.AwaitedSources("", host, s.engines)
		}
		return nil, nil
	case status != http.StatusOK:
		return nil, fmt.Errorf("/kv_event_sources returned status %d; set kv_events of the backend to off, or to the replica's endpoint", status)
	case err != nil:
		return nil, fmt.Errorf("/kv_event_sources: longer than %d bytes", wire.MaxSourcesBytes)
	}
	return wire.ParseSources(res.Body(), host, ours)
}

// replaceSources stops reading the events of a backend, unless it reads them from these sources, and
// starts to read from these.
func (r *Reader) replaceSources(ctx context.Context, b *backends.Backend, sources []wire.Source, engines int) {
	r.mu.Lock()
	old := r.readings[b]
	r.mu.Unlock()
	engines = max(engines, len(sources))
	if old != nil && slices.Equal(old.sources, sources) {
		old.follower.SetEngines(engines)
		return
	}
	if old != nil {
		old.stop()
	}
	started := r.start(ctx, b, sources, engines)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lookedUp[b] = true
	if delete(r.readings, b); started != nil {
		r.readings[b] = started
	}
	r.changed.Notify()
}

// forgetBackend stops reading the events of a backend, of which nothing is known any more.
func (r *Reader) forgetBackend(ctx context.Context, b *backends.Backend) {
	r.replaceSources(ctx, b, nil, 0)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.lookedUp, b)
}

// findTarget returns what a publisher of a server can feed that connects to the port of a rank: no subscriber if there is none, and
// whether that is known. A server with one engine may connect to any port.
func (r *Reader) findTarget(server *backends.Backend, rank int) (t target, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known = true
	for _, b := range server.Parts() {
		known = known && r.lookedUp[b]
		reading := r.readings[b]
		if reading == nil {
			continue
		}
		engine, isRank := b.Engine()
		for _, s := range reading.subscribers {
			if s.Accepted == nil {
				continue
			}
			if isRank && engine == rank || !isRank && (s.Source.Rank == rank || len(reading.subscribers) == 1) {
				return target{s, reading.stopped}, true
			}
		}
	}
	return target{}, known
}

// start starts to read the events of a backend. It returns nil if there are no sources, or the backend
// was removed.
func (r *Reader) start(ctx context.Context, b *backends.Backend, sources []wire.Source, engines int) *reading {
	if len(sources) == 0 {
		return nil
	}
	follower := r.fleet.Follow(b, engines)
	if follower == nil {
		return nil
	}
	r.log.Info("reading KV events", "backend", b.Name, "engines", len(sources))
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	started := &reading{sources: sources, follower: follower, stopped: ctx.Done(), stop: func() {
		cancel()
		work.Wait()
		follower.Close()
	}}
	run := func(loop func(context.Context)) {
		work.Go(func() { r.panics.RunLoop(ctx, recovery.KVEvents, loop) })
	}
	for _, source := range sources {
		s := &wire.Subscriber{Source: source, Handler: follower, Logger: r.log.With("backend", b.Name)}
		if source.Endpoint == "" {
			s.Accepted = make(chan *wire.Connection)
		}
		started.subscribers = append(started.subscribers, s)
		run(s.Run)
	}
	run(func(ctx context.Context) {
		for clock.Sleep(ctx, settleInterval) {
			follower.Settle()
		}
	})
	return started
}
