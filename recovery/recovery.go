// Package recovery keeps a panic in a goroutine from ending the process.
package recovery

import (
	"context"
	"runtime/debug"
	"time"

	"warmroute/clock"
)

// Place is where a panic was recovered.
type Place string

// The places.
const (
	Handler       Place = "handler"  // of a request to either listener
	Dispatch      Place = "dispatch" // a round of the admission queue
	Tick          Place = "tick"     // of the router, outside of a round
	HealthCheck   Place = "health_check"
	Poll          Place = "poll"
	KVEvents      Place = "kv_events"
	Redis         Place = "redis"
	Snapshot      Place = "snapshot"
	Recording     Place = "recording"
	AccessLog     Place = "access_log"
	Removal       Place = "removal" // of a backend
	ConfigReload  Place = "config_reload"
	Discovery     Place = "discovery"      // lookups of a name
	StartHooks    Place = "start_hooks"    // of models
	AddedBackends Place = "added_backends" // exchange of what was added and drained
	History       Place = "history"        // of the queue
	Usage         Place = "usage"          // saves of the keys' usage
	ModelNames    Place = "model_names"    // readiness of the models of names
)

// Places returns all places.
func Places() []Place {
	return []Place{Handler, Dispatch, Tick, HealthCheck, Poll, KVEvents, Redis, Snapshot, Recording, AccessLog, Removal, ConfigReload,
		Discovery, StartHooks, AddedBackends, History, Usage, ModelNames}
}

// Reporter receives each recovered panic. It is safe for concurrent use.
type Reporter func(place Place, cause any, stack []byte)

// restartDelay is the time from a panic of a loop to its next run: one that panics at once must not
// fill the log.
const restartDelay = time.Second

// RunLoop calls loop, and again after each panic of it, until it returns or ctx is done. A nil Reporter
// recovers nothing.
func (report Reporter) RunLoop(ctx context.Context, place Place, loop func(context.Context)) {
	for report.CallAndRecover(place, func() { loop(ctx) }) {
		if !clock.Sleep(ctx, restartDelay) {
			return
		}
	}
}

// CallAndRecover calls f, recovers and reports a panic of it, and returns whether there was one. A nil Reporter recovers
// nothing.
func (report Reporter) CallAndRecover(place Place, f func()) (panicked bool) {
	if report == nil {
		f()
		return false
	}
	defer func() {
		if cause := recover(); cause != nil {
			report(place, cause, debug.Stack())
			panicked = true
		}
	}()
	f()
	return false
}
