package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/recovery"
	"warmroute/router"
)

const (
	hookCheckInterval = time.Second
	hookCallTimeout   = 10 * time.Second
	hookRetryDelay    = 5 * time.Second // after a call that failed
	hookLogInterval   = time.Minute     // between two logs of failures
	maxHookResponse   = 64 << 10
)

var errHookPanicked = errors.New("the call panicked")

// hookCaller calls the URLs of models that requests wait for and no ready backend serves.
type hookCaller struct {
	router   *router.Router
	registry *backends.Registry
	log      *slog.Logger
	panics   recovery.Reporter
	client   http.Client
	settings atomic.Pointer[[]config.StartHook]
}

func newHookCaller(r *router.Router, registry *backends.Registry, log *slog.Logger, panics recovery.Reporter,
	settings []config.StartHook) *hookCaller {
	w := &hookCaller{router: r, registry: registry, log: log, panics: panics, client: http.Client{
		Transport:     &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true},
		Timeout:       hookCallTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	w.settings.Store(&settings)
	return w
}

// configure replaces the settings.
func (w *hookCaller) configure(settings []config.StartHook) { w.settings.Store(&settings) }

// hookState records the calls of the hook of one model. The zero value: none since the model was ready.
type hookState struct {
	calling  bool
	calledAt time.Time // of the last call; zero: none since the model was ready
	failed   bool      // that call
	loggedAt time.Time // when a failure was logged last
}

// isDue reports whether the URL is to be called for requests that wait while the model is not ready.
func (s *hookState) isDue(timeout time.Duration, now time.Time) bool {
	switch {
	case s.calling:
		return false
	case s.calledAt.IsZero():
		return true
	case s.failed:
		return now.Sub(s.calledAt) >= hookRetryDelay
	}
	return now.Sub(s.calledAt) >= timeout
}

// shouldLogFailure reports whether a failure at a time is to be logged.
func (s *hookState) shouldLogFailure(now time.Time) bool {
	return s.loggedAt.IsZero() || now.Sub(s.loggedAt) >= hookLogInterval
}

// hookResult is the end of a call.
type hookResult struct {
	model string
	err   error
}

// run calls URLs until ctx is done. It waits for the calls that are in progress.
func (w *hookCaller) run(ctx context.Context) {
	states, results := map[string]*hookState{}, make(chan hookResult)
	var calls sync.WaitGroup
	defer calls.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // also if this panics
	ticks := time.NewTicker(hookCheckInterval)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case r := <-results:
			w.recordResult(states[r.model], r, time.Now())
			continue
		case <-ticks.C:
		}
		settings := *w.settings.Load()
		for _, s := range settings {
			state := states[s.Model]
			if state == nil {
				state = new(hookState)
				states[s.Model] = state
			}
			if w.isReady(s.Model) {
				state.calledAt, state.failed = time.Time{}, false
				continue
			}
			if !state.isDue(s.Timeout, time.Now()) || !w.router.AwaitsModel(s.Model) {
				continue
			}
			state.calling, state.calledAt = true, time.Now()
			calls.Go(func() {
				r := hookResult{s.Model, errHookPanicked}
				w.panics.CallAndRecover(recovery.StartHooks, func() { r.err = w.call(ctx, s) })
				select {
				case results <- r:
				case <-ctx.Done():
				}
			})
		}
		w.forgetRemoved(states, settings)
	}
}

// recordResult records the end of a call, and logs it.
func (w *hookCaller) recordResult(state *hookState, r hookResult, now time.Time) {
	state.calling, state.failed = false, r.err != nil
	switch {
	case r.err == nil:
		state.loggedAt = time.Time{}
		w.log.Info("model started", "model", r.model)
	case state.shouldLogFailure(now):
		state.loggedAt = now
		w.log.Warn("start hook failed", "model", r.model, "err", r.err)
	}
}

// forgetRemoved removes the states of models that are not configured any more.
func (w *hookCaller) forgetRemoved(states map[string]*hookState, settings []config.StartHook) {
	if len(states) == len(settings) {
		return
	}
	configured := map[string]bool{}
	for _, s := range settings {
		configured[s.Model] = true
	}
	for model, state := range states {
		if !configured[model] && !state.calling {
			delete(states, model)
		}
	}
}

// isReady reports whether a ready backend serves a model.
func (w *hookCaller) isReady(model string) bool {
	entry, listed := w.registry.Catalog().Find(model)
	return listed && w.router.CountReady(entry.Backends) > 0
}

// call calls the URL of a model. The error does not show the URL, which may hold a secret.
func (w *hookCaller) call(ctx context.Context, s config.StartHook) error {
	body, err := json.Marshal(map[string]string{"model": s.Model})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, bytes.NewReader(body))
	if err != nil {
		return errors.New("start_hooks[].url is invalid")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := w.client.Do(req)
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return failed.Err
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxHookResponse))
	if resp.StatusCode >= http.StatusMultipleChoices {
		return fmt.Errorf("start_hooks[].url returned %d", resp.StatusCode)
	}
	return nil
}
