package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/vllm/kvevents"
	"warmroute/metrics"
	"warmroute/recovery"
	"warmroute/router"
)

const (
	kvDiscoveryTimeout = 5 * time.Second
	kvSettingsInterval = 5 * time.Second // after which a changed setting is noticed at the latest
	kvSettleInterval   = 100 * time.Millisecond
)

// kvEventReader reads the KV events of the backends that publish them. Safe for concurrent use.
type kvEventReader struct {
	registry *backends.Registry
	router   *router.Router
	log      *slog.Logger
	panics   recovery.Reporter

	mu   sync.Mutex
	runs map[*backends.Backend]*kvEventRun
}

// kvEventRun reads the events of one backend.
type kvEventRun struct {
	sources     []kvevents.Source
	follower    *router.KVFollower
	subscribers []*kvevents.Subscriber
	stop        func() // waits until all is stopped
}

func newKVEventReader(registry *backends.Registry, r *router.Router, log *slog.Logger, panics recovery.Reporter) *kvEventReader {
	return &kvEventReader{registry: registry, router: r, log: log, panics: panics, runs: map[*backends.Backend]*kvEventRun{}}
}

// watch reads the events of a backend until ctx is done. What it publishes is looked up whenever
// it becomes ready, since it may be another process then, and when its settings change.
func (k *kvEventReader) watch(ctx context.Context, b *backends.Backend) {
	defer k.replace(ctx, b, nil, 0)
	settings := time.NewTicker(kvSettingsInterval)
	defer settings.Stop()
	var found, failed kvSettings // for which the sources were looked up last, and for which that failed
	for {
		changed := k.registry.StateChanged()
		if b.State() != backends.Ready {
			found = kvSettings{}
		} else if s := kvSettingsOf(b); s != found {
			sources, err := k.findSources(ctx, b, s)
			if err != nil && ctx.Err() == nil && s != failed {
				failed = s
				k.log.Warn("KV event sources not found", "backend", b.Name, "err", err)
			}
			if err == nil || len(sources) > 0 {
				found = s
				k.replace(ctx, b, sources, s.engines)
			} // else it is tried again
		}
		select {
		case <-changed:
		case <-settings.C:
		case <-ctx.Done():
			return
		}
	}
}

// kvSettings are what the sources of a backend depend on.
type kvSettings struct {
	events, replay string
	engines        int
}

func kvSettingsOf(b *backends.Backend) kvSettings {
	o, engines := b.Options(), 1
	if l := b.Load(); l != nil {
		engines = max(1, l.Engines)
	}
	return kvSettings{o.KVEvents, o.KVReplay, engines}
}

// findSources returns where a replica publishes its events; nothing if it does not. It may return
// some of the sources and an error about others.
func (k *kvEventReader) findSources(ctx context.Context, b *backends.Backend, s kvSettings) ([]kvevents.Source, error) {
	host := b.URL.Hostname()
	switch s.events {
	case backends.KVEventsOff, "":
		return nil, nil
	case backends.KVEventsAuto:
	default:
		return kvevents.ConfiguredSources(s.events, s.replay, "", host, s.engines)
	}
	ctx, cancel := context.WithTimeout(ctx, kvDiscoveryTimeout)
	defer cancel()
	res, err := b.Get(ctx, "/kv_event_sources", "application/json", "")
	if err != nil {
		return nil, fmt.Errorf("/kv_event_sources: %w", err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(http.MaxBytesReader(nil, res.Body, kvevents.MaxSourcesBytes))
	switch {
	case res.StatusCode == http.StatusNotFound, res.StatusCode == http.StatusMethodNotAllowed:
		return nil, nil // of a version without it
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("/kv_event_sources answered %d; set kv_events of the backend to off, or to the replica's endpoint", res.StatusCode)
	case err != nil:
		return nil, fmt.Errorf("/kv_event_sources: %w", err)
	}
	return kvevents.ParseSources(body, host)
}

// replace stops what reads the events of a backend, unless it reads from these sources, and
// starts to read from them.
func (k *kvEventReader) replace(ctx context.Context, b *backends.Backend, sources []kvevents.Source, engines int) {
	k.mu.Lock()
	run := k.runs[b]
	k.mu.Unlock()
	if run != nil {
		if slices.Equal(run.sources, sources) {
			run.follower.SetEngines(max(engines, len(sources)))
			return
		}
		run.stop()
	}
	run = nil
	if len(sources) > 0 {
		run = k.start(ctx, b, sources, engines)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if delete(k.runs, b); run != nil {
		k.runs[b] = run
	}
}

// start begins to read the events of a backend. It returns nil if the backend was removed.
func (k *kvEventReader) start(ctx context.Context, b *backends.Backend, sources []kvevents.Source, engines int) *kvEventRun {
	follower := k.router.FollowKVEvents(b, max(engines, len(sources)))
	if follower == nil {
		return nil
	}
	k.log.Info("reading KV events", "backend", b.Name, "engines", len(sources))
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	run := &kvEventRun{sources: sources, follower: follower, stop: func() {
		cancel()
		work.Wait()
		follower.Close()
	}}
	for _, source := range sources {
		s := &kvevents.Subscriber{Source: source, Handler: engineEvents{follower, source.Rank}, Logger: k.log.With("backend", b.Name)}
		run.subscribers = append(run.subscribers, s)
		work.Go(func() { k.panics.RunLoop(ctx, recovery.KVEvents, s.Run) })
	}
	work.Go(func() {
		k.panics.RunLoop(ctx, recovery.KVEvents, func(ctx context.Context) { settlePeriodically(ctx, follower) })
	})
	return run
}

// settlePeriodically settles what the events of a follower have told, until ctx is done.
func settlePeriodically(ctx context.Context, follower *router.KVFollower) {
	ticks := time.NewTicker(kvSettleInterval)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
			follower.Settle()
		case <-ctx.Done():
			return
		}
	}
}

// stats returns what was received from a backend; nil if its events are not read.
func (k *kvEventReader) stats(b *backends.Backend) (engines metrics.KVEventStats) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if run := k.runs[b]; run != nil {
		for _, s := range run.subscribers {
			engines = append(engines, s.Stats())
		}
	}
	return engines
}

// engineEvents passes the events of one engine to the follower of its replica.
type engineEvents struct {
	follower *router.KVFollower
	rank     int
}

func (e engineEvents) Restart(complete bool)       { e.follower.Restart(e.rank, complete) }
func (e engineEvents) Apply(batch *kvevents.Batch) { e.follower.Apply(e.rank, batch) }
