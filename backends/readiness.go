package backends

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"warmroute/backends/transport"
)

const (
	// maxModelsBytes bounds a replica's /v1/models: thousands of adapters fit.
	maxModelsBytes = 8 << 20

	// suspicionGap is the least time between two checks of a backend, so that a
	// burst of failed attempts does not become a burst of checks.
	suspicionGap = 100 * time.Millisecond
)

// Checker keeps the backends' states and models up to date. A backend is Ready
// when its /health is 200 and its /v1/models lists at least one model. A refused
// or reset connection or another answer makes it Down at once, a timeout only
// the second time in a row, since a busy Python event loop answers late. A
// backend that drains is checked as well, so that what it comes back as is known.
//
// The fields are not to be changed once Follow was called.
type Checker struct {
	Logger *slog.Logger // nil: silent

	// Instance is sent with each check (InstanceHeader): a backend that turns out to
	// be the proxy with this id, or to have it as a backend, refuses. Empty: not sent.
	Instance string

	// OnState is called after a state changed, and once after the first check of
	// each backend, in the goroutine that checks it.
	OnState func(b *Backend, s State, reason string)

	// OnLost is called when a check finds that nothing listens any more: the
	// replica's process is gone, and its prefix cache with it.
	OnLost func(b *Backend, reason string)

	// OutOfDescriptors is called when a check could not be made because this process
	// has no file descriptor left. The backend stays what it was. nil: not called.
	OutOfDescriptors func(err error)

	// OnHung is called when a backend is no longer well because its checks are not
	// answered in time, after OnState: what it was sent may wait for ever.
	OnHung func(b *Backend)

	pace changing[CheckPace]
}

// CheckPace is how often a Checker looks, and how long. Zero means the default.
type CheckPace struct {
	Interval     time.Duration // between checks of a backend that is well; 5 s
	DownInterval time.Duration // while it is down or was late; 1 s
	Timeout      time.Duration // for each of a check's two requests; 5 s
}

// SetPace holds from the next check on; those who wait for it wait anew.
func (c *Checker) SetPace(p CheckPace) { c.pace.set(p) }

// Follow checks b at once and then until ctx is done. One call a backend, each
// in a goroutine of its own: so a hanging replica delays no other, and never has
// two checks at a time.
func (c *Checker) Follow(ctx context.Context, b *Backend) {
	late := 0 // checks in a row that ran into the timeout
	w := checks{Checker: c, backend: b, told: unchecked}
	for {
		forget(b.suspected) // older than the check that begins
		pace, changed := c.pace.get()
		models, err := c.check(ctx, b, cmp.Or(pace.Timeout, 5*time.Second))
		if ctx.Err() != nil {
			return
		}
		starved := transport.IsOutOfDescriptors(err)
		switch {
		case starved:
			w.outOfDescriptors(err)
		case isTimeout(err):
			late++
		default:
			late = 0
		}
		switch forgiven := late == 1 && b.standing.Load()&healthy != 0; {
		case !starved && !forgiven:
			w.settle(models, err)
		case w.told != unchecked: // or an operator's change would not be told
			w.tell("the last check says nothing: it was late, or could not be made")
		}
		wait := cmp.Or(pace.Interval, 5*time.Second)
		if err != nil {
			wait = cmp.Or(pace.DownInterval, time.Second)
		}
		wait = jitter(wait)
		b.SetNextCheck(time.Now().Add(wait))
		if !restUnlessSuspected(ctx, wait, b.suspected, changed) {
			return
		}
	}
}

// Suspect asks for a check of b soon, because an attempt on it failed. It never
// blocks, and suspicions that come together become one check.
func (c *Checker) Suspect(b *Backend) { b.suspect() }

// restUnlessSuspected waits between two checks and reports whether ctx lasted.
func restUnlessSuspected(ctx context.Context, d time.Duration, suspected, changed <-chan struct{}) bool {
	checked := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-changed:
		return true
	case <-ctx.Done():
		return false
	case <-suspected:
		return rest(ctx, suspicionGap-time.Since(checked))
	}
}

func forget(suspected <-chan struct{}) {
	select {
	case <-suspected:
	default:
	}
}

// checks is what a Checker remembers of one backend between checks.
type checks struct {
	*Checker
	backend *Backend
	told    State // that was told last
}

const unchecked State = -1

func (w *checks) outOfDescriptors(err error) {
	if w.OutOfDescriptors != nil {
		w.OutOfDescriptors(err)
	}
}

// settle makes the backend what a check said.
func (w *checks) settle(models []Model, err error) {
	b := w.backend
	reason := fmt.Sprintf("healthy and lists %d model(s)", len(models))
	if err != nil {
		reason = err.Error()
	} else if !sameModels(b.Models(), models) {
		b.SetModels(models) // before Ready, so that whoever sees it ready finds its models
	}
	b.setCheckResult(err)
	changed := b.set(healthy, err == nil) || w.told == unchecked
	if changed && w.OnLost != nil && errors.Is(err, syscall.ECONNREFUSED) {
		w.OnLost(b, reason)
	}
	w.tell(reason)
	if changed && w.OnHung != nil && isTimeout(err) {
		w.OnHung(b)
	}
}

// tell tells of a state that is another than the one that was told last.
func (w *checks) tell(reason string) {
	b, state := w.backend, w.backend.State()
	if state == w.told {
		return
	}
	w.told = state
	switch {
	case b.Retiring():
		reason = "it is no longer in the configuration"
	case state == Draining:
		reason = "by the operator's word"
	}
	if log := w.Logger; log != nil {
		level := slog.LevelInfo
		if state == Down {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, "backend state", "backend", b.Name, "state", state.String(), "reason", reason)
	}
	if w.OnState != nil {
		w.OnState(b, state, reason)
	}
}

// check asks a replica once whether it is well and what it serves.
func (c *Checker) check(ctx context.Context, b *Backend, limit time.Duration) ([]Model, error) {
	if _, err := c.ask(ctx, b, "/health", limit); err != nil {
		return nil, err
	}
	body, err := c.ask(ctx, b, "/v1/models", limit)
	if err != nil {
		return nil, err
	}
	models, err := parseModels(body)
	if err != nil {
		return nil, fmt.Errorf("/v1/models: %w", err)
	}
	if len(models) == 0 {
		return nil, errors.New("/v1/models lists no model")
	}
	return models, nil
}

func (c *Checker) ask(ctx context.Context, b *Backend, path string, limit time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res, err := b.get(ctx, path, "application/json", c.Instance)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer res.Body.Close()
	instance := res.Header.Get(InstanceHeader)
	b.instance.Store(&instance)
	body, err := io.ReadAll(http.MaxBytesReader(nil, res.Body, maxModelsBytes))
	switch {
	case res.StatusCode == http.StatusUnauthorized, res.StatusCode == http.StatusForbidden:
		return nil, fmt.Errorf("%s answered %d; set the backend's api_key to the replica's", path, res.StatusCode)
	case res.StatusCode >= 300 && res.StatusCode < 400:
		return nil, fmt.Errorf("%s answered %d, a redirect to %.200q; give the backend the URL of the replica itself", path, res.StatusCode, res.Header.Get("Location"))
	case res.StatusCode == http.StatusLoopDetected:
		return nil, c.loopError(path, instance)
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answered %d", path, res.StatusCode)
	case isTooLong(err):
		return nil, fmt.Errorf("%s: longer than %d bytes", path, maxModelsBytes)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return body, nil
}

// loopError is for a path that the proxy with that instance id answered with 508.
func (c *Checker) loopError(path, instance string) error {
	switch instance {
	case "":
		return fmt.Errorf("%s answered 508: the backend leads back to a proxy (loop)", path)
	case c.Instance:
		return fmt.Errorf("%s answered 508: the backend is this proxy itself (loop); remove it from the backends", path)
	}
	return fmt.Errorf("%s answered 508: the backend has this proxy among its own backends (loop); remove one of the two", path)
}

// isTooLong reports whether a MaxBytesReader ended the reading.
func isTooLong(err error) bool {
	var long *http.MaxBytesError
	return errors.As(err, &long)
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
