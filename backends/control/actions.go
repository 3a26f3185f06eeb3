package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/backends/vllm"
)

// Action is what is to be done to a replica. The fields of its types are the JSON fields of a request.
type Action interface {
	// LogAttributes returns the parameters that the log shows, as alternating names and values.
	LogAttributes() []any
	validate() error
	run(ctx context.Context, t *target) error
}

// ActionNames returns the names of all actions.
func ActionNames() []string {
	return []string{"sleep", "wake", "pause", "resume", "reset-cache", "load-adapter", "unload-adapter"}
}

// newAction returns the action of that name with its default parameters; nil if there is none.
func newAction(name string) Action {
	switch name {
	case "sleep":
		return &sleep{Level: vllm.SleepOffload, Wait: defaultWait}
	case "wake":
		return &wake{}
	case "pause":
		return &pause{Mode: vllm.ModeWait, Wait: defaultWait}
	case "resume":
		return &resume{}
	case "reset-cache":
		return &resetCache{Wait: defaultWait}
	case "load-adapter":
		return &loadAdapter{}
	case "unload-adapter":
		return &unloadAdapter{}
	}
	return nil
}

// sleep drains a replica and puts its engine to sleep.
type sleep struct {
	Level int      `json:"level"`
	Wait  Duration `json:"wait"`  // for requests in flight
	Force bool     `json:"force"` // abort those left afterwards
}

func (a *sleep) LogAttributes() []any { return []any{"level", a.Level, "force", a.Force} }

func (a *sleep) validate() error {
	if a.Level < vllm.SleepScheduler || a.Level > vllm.SleepDiscard {
		return fmt.Errorf("level must be from %d to %d", vllm.SleepScheduler, vllm.SleepDiscard)
	}
	return a.Wait.validate("wait", 0)
}

func (a *sleep) run(ctx context.Context, t *target) error {
	// Requests of other clients than this proxy may run on.
	before, mode := t.Suspension(), vllm.ModeWait
	if err := t.suspendAndDrain(ctx, backends.FallingAsleep, time.Duration(a.Wait)); err != nil {
		if !a.Force || ctx.Err() != nil {
			return err
		}
		mode = vllm.ModeAbort
		t.setSuspension(backends.FallingAsleep)
	}
	err := t.callSuspended(ctx, vllm.Sleep(a.Level, mode), before, backends.Asleep)
	if t.Suspension() == backends.Asleep && a.Level > vllm.SleepScheduler {
		t.recordCacheReset()
	}
	return err
}

// wake wakes a replica's engine.
type wake struct {
	Tags []string `json:"tags"` // the parts to wake; empty: all
}

// maxTags bounds the parts of an engine that are woken: vLLM has three.
const maxTags = 8

func (a *wake) LogAttributes() []any { return []any{"tags", a.Tags} }

func (a *wake) validate() error {
	if len(a.Tags) > maxTags {
		return fmt.Errorf("tags has more than %d elements", maxTags)
	}
	return nil
}

func (a *wake) run(ctx context.Context, t *target) error {
	called := time.Now()
	err := t.call(ctx, vllm.WakeUp(a.Tags))
	if len(a.Tags) > 0 && errors.Is(err, vllm.ErrStillAsleep) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	if err := t.AwaitCheck(ctx); err != nil {
		return fmt.Errorf("the engine is awake, but the health check fails: %w", err)
	}
	// Without metrics there is nothing that still says asleep.
	if t.Load() != nil {
		if err := t.PollUntil(ctx, called, func(l *backends.Load) bool { return !l.Asleep }); err != nil {
			return fmt.Errorf("the engine is awake, but its metrics do not say so: %w", err)
		}
	}
	t.setSuspension(backends.NotSuspended)
	return nil
}

// pause stops a replica's engine.
type pause struct {
	Mode       string   `json:"mode"`
	ClearCache bool     `json:"clear_cache"`
	Wait       Duration `json:"wait"` // for requests in flight in mode wait
}

func (a *pause) LogAttributes() []any { return []any{"mode", a.Mode, "clear_cache", a.ClearCache} }

func (a *pause) validate() error {
	if modes := []string{vllm.ModeWait, vllm.ModeKeep, vllm.ModeAbort}; !slices.Contains(modes, a.Mode) {
		return errors.New("mode must be wait, keep or abort")
	}
	return a.Wait.validate("wait", 0)
}

func (a *pause) run(ctx context.Context, t *target) error {
	before := t.Suspension()
	if t.isAsleep() {
		return errAsleep
	}
	if a.Mode == vllm.ModeWait {
		if err := t.suspendAndDrain(ctx, backends.Pausing, time.Duration(a.Wait)); err != nil {
			return err
		}
	} else {
		t.setSuspension(backends.Pausing)
	}
	err := t.callSuspended(ctx, vllm.Pause(a.Mode, a.ClearCache), before, backends.Paused)
	if t.Suspension() == backends.Paused && a.ClearCache {
		t.recordCacheReset()
	}
	return err
}

// errAsleep is the error of actions that vLLM would carry out on an engine whose memory is gone.
var errAsleep = errors.New("the engine is asleep: wake it first")

// isAsleep reports whether the engine is asleep as far as is known.
func (t *target) isAsleep() bool {
	l := t.Load()
	return t.Suspension() == backends.Asleep || l != nil && l.Asleep
}

// resume ends a pause.
type resume struct{}

func (a *resume) LogAttributes() []any { return nil }
func (a *resume) validate() error      { return nil }

func (a *resume) run(ctx context.Context, t *target) error {
	if t.isAsleep() {
		return errAsleep
	}
	if err := t.call(ctx, vllm.Resume()); err != nil {
		return err
	}
	t.setSuspension(backends.NotSuspended)
	return nil
}

// resetCache empties a replica's prefix cache.
type resetCache struct {
	Wait  Duration `json:"wait"`  // for requests that use it
	Force bool     `json:"force"` // have them computed again instead
}

// resetRetryInterval separates the calls while requests of other clients, or transfers, use the cache.
const resetRetryInterval = 200 * time.Millisecond

func (a *resetCache) LogAttributes() []any { return []any{"force", a.Force} }
func (a *resetCache) validate() error      { return a.Wait.validate("wait", 0) }

func (a *resetCache) run(ctx context.Context, t *target) error {
	err := t.call(ctx, vllm.ResetPrefixCache(a.Force))
	if errors.Is(err, vllm.ErrBlocksInUse) {
		err = a.drainAndReset(ctx, t)
	}
	if err == nil {
		t.recordCacheReset()
	}
	return err
}

// drainAndReset resets the cache as soon as no request uses it, and sends the replica no new ones until then.
func (a *resetCache) drainAndReset(ctx context.Context, t *target) error {
	before, end := t.Suspension(), time.Now().Add(time.Duration(a.Wait))
	if err := t.suspendAndDrain(ctx, backends.ResettingCache, time.Duration(a.Wait)); err != nil {
		return err
	}
	defer t.setSuspension(before)
	for {
		err := t.call(ctx, vllm.ResetPrefixCache(false))
		if !errors.Is(err, vllm.ErrBlocksInUse) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(resetRetryInterval):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// loadAdapter loads a LoRA adapter.
type loadAdapter struct {
	Adapter string `json:"adapter"`
	Path    string `json:"path"` // on the replica's machine
	InPlace bool   `json:"in_place"`
}

func (a *loadAdapter) LogAttributes() []any { return []any{"adapter", a.Adapter, "path", a.Path} }

func (a *loadAdapter) validate() error {
	if a.Path == "" {
		return errors.New("path is missing: where the replica finds the adapter")
	}
	return validateAdapter(a.Adapter)
}

func validateAdapter(name string) error {
	if name == "" {
		return errors.New("adapter is missing: the name of the adapter")
	}
	return nil
}

func (a *loadAdapter) run(ctx context.Context, t *target) error {
	if t.isAsleep() {
		return errAsleep
	}
	if err := t.call(ctx, vllm.LoadAdapter(a.Adapter, a.Path, a.InPlace)); err != nil {
		return err
	}
	return t.awaitModel(ctx, a.Adapter, true)
}

// unloadAdapter unloads a LoRA adapter.
type unloadAdapter struct {
	Adapter string `json:"adapter"`
}

func (a *unloadAdapter) LogAttributes() []any { return []any{"adapter", a.Adapter} }
func (a *unloadAdapter) validate() error      { return validateAdapter(a.Adapter) }

func (a *unloadAdapter) run(ctx context.Context, t *target) error {
	if err := t.call(ctx, vllm.UnloadAdapter(a.Adapter)); err != nil {
		return err
	}
	return t.awaitModel(ctx, a.Adapter, false)
}

// awaitModel has the replica checked, so that the catalog has what its /v1/models lists now. It fails unless
// the model is listed as expected.
func (t *target) awaitModel(ctx context.Context, model string, listed bool) error {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	if err := t.AwaitCheck(ctx); err != nil {
		return fmt.Errorf("the replica has done it, but its health check fails: %w", err)
	}
	if slices.ContainsFunc(t.Models(), func(m backends.Model) bool { return m.ID == model }) == listed {
		return nil
	}
	if listed {
		return fmt.Errorf("the replica has loaded %q, but /v1/models does not list it", model)
	}
	return fmt.Errorf("the replica has unloaded %q, but /v1/models still lists it", model)
}
