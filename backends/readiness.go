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
	"sync"
	"syscall"
	"time"
)

const (
	// maxModelsBytes bounds a replica's /v1/models: thousands of adapters fit.
	maxModelsBytes = 8 << 20

	// suspicionGap is the least time between two checks of a backend, so that a
	// burst of failed attempts does not become a burst of checks.
	suspicionGap = 100 * time.Millisecond
)

// Checker keeps every backend's state and models up to date. A backend is Ready
// when its /health is 200 and its /v1/models lists at least one model. A refused
// or reset connection or another answer makes it Down at once, a timeout only
// the second time in a row, since a busy Python event loop answers late. Draining
// is the operator's and is kept.
//
// The fields are not to be changed once Run was called; zero means the default.
type Checker struct {
	Backends []*Backend // of a Registry

	Interval     time.Duration // between checks of a backend that is well; 5 s
	DownInterval time.Duration // while it is down or was late; 1 s
	Timeout      time.Duration // for each of a check's two requests; 5 s

	Logger *slog.Logger // nil: silent

	// OnState is called after a state changed, and once after the first check of
	// each backend, in the goroutine that checks it.
	OnState func(b *Backend, s State, reason string)

	// OnLost is called when a check finds that nothing listens any more: the
	// replica's process is gone, and its prefix cache with it.
	OnLost func(b *Backend, reason string)
}

// Run checks every backend at once and then until ctx is done, and returns when
// the checks under way have ended. Each backend has a goroutine of its own, so a
// hanging replica delays no other, and never has two checks at a time.
func (c *Checker) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, b := range c.Backends {
		all.Go(func() { c.follow(ctx, b) })
	}
	all.Wait()
}

// Suspect asks for a check of b soon, because an attempt on it failed. It never
// blocks, and suspicions that come together become one check.
func (c *Checker) Suspect(b *Backend) {
	select {
	case b.suspected <- struct{}{}:
	default:
	}
}

func (c *Checker) follow(ctx context.Context, b *Backend) {
	late := 0 // checks in a row that ran into the timeout
	for first := true; ; first = false {
		forget(b.suspected) // older than the check that begins
		models, err := c.check(ctx, b)
		if ctx.Err() != nil {
			return
		}
		if isTimeout(err) {
			late++
		} else {
			late = 0
		}
		if forgiven := late == 1 && b.State() == Ready; !forgiven {
			c.settle(b, models, err, first)
		}
		wait := cmp.Or(c.Interval, 5*time.Second)
		if err != nil {
			wait = cmp.Or(c.DownInterval, time.Second)
		}
		if !restUnlessSuspected(ctx, jitter(wait), b.suspected) {
			return
		}
	}
}

// restUnlessSuspected waits between two checks and reports whether ctx lasted.
func restUnlessSuspected(ctx context.Context, d time.Duration, suspected <-chan struct{}) bool {
	checked := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
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

// settle makes b what a check said.
func (c *Checker) settle(b *Backend, models []Model, err error, first bool) {
	to, reason := Ready, fmt.Sprintf("healthy and lists %d model(s)", len(models))
	if err != nil {
		to, reason = Down, err.Error()
	} else if !sameModels(b.Models(), models) {
		b.SetModels(models) // before Ready, so that whoever sees it ready finds its models
	}
	if !b.transition(to) && !first {
		return
	}
	if c.OnLost != nil && errors.Is(err, syscall.ECONNREFUSED) {
		c.OnLost(b, reason)
	}
	state := b.State() // Draining, when the operator was faster
	if log := c.Logger; log != nil {
		level := slog.LevelInfo
		if state == Down {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, "backend state", "backend", b.Name, "state", state.String(), "reason", reason)
	}
	if c.OnState != nil {
		c.OnState(b, state, reason)
	}
}

// check asks a replica once whether it is well and what it serves.
func (c *Checker) check(ctx context.Context, b *Backend) ([]Model, error) {
	if _, err := c.ask(ctx, b, "/health"); err != nil {
		return nil, err
	}
	body, err := c.ask(ctx, b, "/v1/models")
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

func (c *Checker) ask(ctx context.Context, b *Backend, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(c.Timeout, 5*time.Second))
	defer cancel()
	res, err := b.get(ctx, path, "application/json")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(http.MaxBytesReader(nil, res.Body, maxModelsBytes))
	switch {
	case res.StatusCode == http.StatusUnauthorized, res.StatusCode == http.StatusForbidden:
		return nil, fmt.Errorf("%s answered %d; set the backend's api_key to the replica's", path, res.StatusCode)
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answered %d", path, res.StatusCode)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return body, nil
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
