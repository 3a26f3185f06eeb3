package backends

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
)

const (
	maxModelsBytes = 8 << 20 // of /v1/models: thousands of adapters fit

	// minCheckInterval separates two checks of a backend, so that a burst of failed
	// attempts does not become a burst of checks.
	minCheckInterval = 100 * time.Millisecond

	defaultCheckInterval     = 5 * time.Second
	defaultDownCheckInterval = time.Second
	defaultCheckTimeout      = 5 * time.Second
)

// Checker keeps the backends' states and models up to date. A backend is Ready when its /health is
// 200 and its /v1/models lists at least one model. A refused or reset connection or another status
// makes it Down at once, a timeout only the second time in a row, since a busy Python event loop
// responds late. Draining backends are checked too, so that their state is known when they return.
//
// Do not change the fields once Watch was called.
type Checker struct {
	Logger *slog.Logger // nil: silent

	// Instance is sent with each check (InstanceHeader), so that a backend which is
	// the proxy with this id, or has it as a backend, refuses. Empty: not sent.
	Instance string

	// OnState is called after a state changed, and once after the first check of
	// each backend, in the goroutine that checks it. As the other callbacks it is called for a
	// server's Parts as well, whose state follows from the same checks.
	OnState func(b *Backend, s State, reason string)

	// OnCacheLost is called when a check finds that nothing listens any more, or that other base models
	// are served: the replica's process is gone, and its prefix cache with it.
	OnCacheLost func(b *Backend, reason string)

	// OnOutOfDescriptors is called when a check could not be made because this
	// process has no file descriptor left. The backend keeps its state.
	OnOutOfDescriptors func(err error)

	// OnHung is called, after OnState, when a backend goes down because its checks
	// time out: requests in flight there may wait forever.
	OnHung func(b *Backend)

	settings setting[HealthSettings]
}

// HealthSettings configure a Checker. Zero means the default.
type HealthSettings struct {
	Interval     time.Duration `mapstructure:"interval" range:"10ms.."`      // between checks of a backend that passes them; 5 s
	DownInterval time.Duration `mapstructure:"down_interval" range:"10ms.."` // while it is down or its last check timed out; 1 s
	Timeout      time.Duration `mapstructure:"timeout" range:"1ms.."`        // for each of a check's two requests; 5 s
}

// SetSettings applies from the next check on; current waits restart.
func (c *Checker) SetSettings(s HealthSettings) { c.settings.set(s) }

// Watch checks b at once and then until ctx is done. Call it once per backend, each in its own
// goroutine: a hanging replica then delays no other, and never has two checks at a time.
func (c *Checker) Watch(ctx context.Context, b *Backend) {
	timeouts := 0 // in a row
	w := checkState{Checker: c, backend: b, reported: map[*Backend]State{}}
	for ctx.Err() == nil {
		select {
		case <-b.checkRequested: // served by the check that begins
		default:
		}
		settings, changed := c.settings.get()
		b.recordCheckBegun()
		models, err := c.checkOnce(ctx, b, cmp.Or(settings.Timeout, defaultCheckTimeout))
		if ctx.Err() != nil {
			return
		}
		outOfDescriptors := transport.IsOutOfDescriptors(err)
		switch {
		case outOfDescriptors:
			if w.OnOutOfDescriptors != nil {
				w.OnOutOfDescriptors(err)
			}
		case isTimeout(err):
			timeouts++
		default:
			timeouts = 0
		}
		switch firstTimeout := timeouts == 1 && b.isHealthy(); {
		case !outOfDescriptors && !firstTimeout:
			w.updatePause(ctx, err == nil, cmp.Or(settings.Timeout, defaultCheckTimeout))
			w.updateVersion(ctx, err == nil, cmp.Or(settings.Timeout, defaultCheckTimeout))
			w.applyCheckResult(models, err)
		case len(w.reported) > 0: // an operator may have changed the state
			w.reportStateChanges("last check inconclusive: it timed out or could not be made")
		}
		wait := cmp.Or(settings.Interval, defaultCheckInterval)
		if err != nil || b.Suspension() == PausedByOther {
			wait = cmp.Or(settings.DownInterval, defaultDownCheckInterval)
		}
		wait = jitter(wait)
		checked := time.Now()
		b.RecordNextCheck(checked.Add(wait))
		if sleep(ctx, wait, b.checkRequested, changed) {
			sleep(ctx, minCheckInterval-time.Since(checked), nil, nil)
		}
	}
}

// checkState is a Checker's state of one backend between checks.
type checkState struct {
	*Checker
	backend  *Backend
	reported map[*Backend]State // the last one of the backend and of each of its parts

	lacksPause bool // it does not say whether its engine is paused, as without VLLM_SERVER_DEV_MODE
	wasPaused  bool // it said so last
}

// updatePause asks a replica that passes its checks whether its engine is paused, and suspends the backend while it
// is, unless an operator's action has done that. The end of a pause ends also that of an operator.
func (w *checkState) updatePause(ctx context.Context, passes bool, timeout time.Duration) {
	if !passes {
		w.lacksPause, w.wasPaused = false, false // it may be another process next time
		return
	}
	if w.lacksPause {
		return
	}
	b, paused := w.backend, false
	if body, err := w.getBodyAndRecordProxyInstance(ctx, b, "/is_paused", timeout); err != nil {
		w.lacksPause = true
	} else if paused, err = vllm.ParsePaused(body); err != nil {
		w.lacksPause = true
	}
	switch s := b.Suspension(); {
	case paused && s == NotSuspended:
		b.setSuspension(PausedByOther)
	case !paused && (s == PausedByOther || s == Paused && w.wasPaused):
		b.setSuspension(NotSuspended)
	}
	w.wasPaused = paused
}

// updateVersion asks a replica that passes its checks for its version, unless it has told it and is still the same
// process.
func (w *checkState) updateVersion(ctx context.Context, passes bool, timeout time.Duration) {
	b := w.backend
	if !b.isHealthy() {
		b.SetVersion("")
	}
	unknown := b.version.Load()
	if !passes || b.Version() != "" {
		return
	}
	body, err := w.getBodyAndRecordProxyInstance(ctx, b, "/version", timeout)
	if err != nil {
		return // the next check asks again
	}
	if version, err := vllm.ParseVersion(body); err == nil {
		b.version.CompareAndSwap(unknown, &version) // fails if a poll has found another process meanwhile
	}
}

// applyCheckResult sets the backend's state and models to the outcome of a check.
func (w *checkState) applyCheckResult(models []Model, err error) {
	b := w.backend
	defer b.recordCheckFinished()
	reason := fmt.Sprintf("healthy, models: %d", len(models))
	if before := b.Models(); err != nil {
		reason = err.Error()
	} else if !vllm.EqualModels(before, models) {
		b.SetModels(models) // before Ready, so that a ready backend has its models
		b.ForgetMissingEndpoints()
		if before != nil && !vllm.HaveSameBaseModels(before, models) {
			w.reportCacheLost("the replica serves another model")
		}
	}
	b.recordCheckResult(err)
	if err == nil && !b.isHealthy() {
		b.ForgetMissingEndpoints() // it may be another process; before Ready as well
	}
	changed := b.setFlag(healthy, err == nil) || len(w.reported) == 0
	if changed && errors.Is(err, syscall.ECONNREFUSED) {
		b.setSuspension(NotSuspended) // it was that of a process that has ended
		w.reportCacheLost(reason)
	}
	w.reportStateChanges(reason)
	if changed && w.OnHung != nil && isTimeout(err) {
		for _, m := range b.Parts() {
			w.OnHung(m)
		}
	}
}

// reportCacheLost calls OnCacheLost for each part of the backend.
func (w *checkState) reportCacheLost(reason string) {
	if w.OnCacheLost == nil {
		return
	}
	for _, m := range w.backend.Parts() {
		w.OnCacheLost(m, reason)
	}
}

// reportStateChanges logs the state of the backend, and calls OnState for it and its parts, where the state is not
// the one reported last. That of a part is logged where it is not the server's.
func (w *checkState) reportStateChanges(reason string) {
	last := w.reported
	w.reported = map[*Backend]State{}
	for _, b := range w.backend.WithParts() {
		state := b.State()
		w.reported[b] = state
		before, known := last[b]
		if known && state == before {
			continue
		}
		if b == w.backend || state != w.reported[w.backend] || known && before != last[w.backend] {
			w.logState(b, state, reason)
		}
		if w.OnState != nil {
			w.OnState(b, state, reason)
		}
	}
}

// logState logs the state of the backend or one of its parts.
func (w *checkState) logState(b *Backend, state State, reason string) {
	switch {
	case state == Draining && b.Retiring():
		reason = "being removed"
	case state == Draining && b.Suspension() != NotSuspended && !b.Drained():
		reason = b.Suspension().String()
	case state == Draining:
		reason = "by operator"
	}
	level := slog.LevelInfo
	if state == Down {
		level = slog.LevelWarn
	}
	backendLogger(w.Logger, b).Log(context.Background(), level, "backend state", "state", state.String(), "reason", reason)
}

// checkOnce requests a replica's /health and /v1/models once.
func (c *Checker) checkOnce(ctx context.Context, b *Backend, timeout time.Duration) ([]Model, error) {
	if _, err := c.getBodyAndRecordProxyInstance(ctx, b, "/health", timeout); err != nil {
		return nil, err
	}
	body, err := c.getBodyAndRecordProxyInstance(ctx, b, "/v1/models", timeout)
	if err != nil {
		return nil, err
	}
	models, err := vllm.ParseModels(body)
	if err != nil {
		return nil, fmt.Errorf("/v1/models: %w%s", err, notVLLM)
	}
	if len(models) == 0 {
		return nil, errors.New("/v1/models lists no model")
	}
	return models, nil
}

// getBodyAndRecordProxyInstance requests path and returns the body of a 200. It records the proxy that
// responded, if it was one.
func (c *Checker) getBodyAndRecordProxyInstance(ctx context.Context, b *Backend, path string, timeout time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	res, err := b.Get(ctx, path, "application/json", c.Instance, maxModelsBytes)
	if res == nil {
		return nil, fmt.Errorf("%s: %w%s", path, err, connectionAdvice(err, b.URL.Scheme, len(b.Models()) > 0))
	}
	defer fasthttp.ReleaseResponse(res)
	instance := string(res.Header.Peek(InstanceHeader))
	b.instance.Store(&instance)
	switch status := res.StatusCode(); {
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return nil, fmt.Errorf("%s returned %d; set the backend's api_key to the replica's", path, status)
	case status >= 300 && status < 400:
		return nil, fmt.Errorf("%s returned %d, a redirect to %.200q; give the backend the URL of the replica itself",
			path, status, res.Header.Peek("Location"))
	case status == http.StatusLoopDetected:
		return nil, c.newLoopError(path, instance)
	case vllm.IsScalingError(status, res.Body()):
		return nil, fmt.Errorf("%s: the replica is changing the number of its engines, or is not used any more (elastic expert parallelism)",
			path)
	case status != http.StatusOK:
		return nil, fmt.Errorf("%s returned %d%s", path, status, statusAdvice(status, b.URL.Scheme))
	case err != nil:
		return nil, fmt.Errorf("%s: longer than %d bytes", path, maxModelsBytes)
	}
	return res.Body(), nil
}

// notVLLM is the advice about a response that no vLLM server gives.
const notVLLM = "; the server is not vLLM, or has a path before /v1: give the backend the URL of vLLM's API server"

// statusAdvice returns what to do about a status of /health or /v1/models; "" if a vLLM server may
// respond with it.
func statusAdvice(status int, scheme string) string {
	switch {
	case status == http.StatusBadRequest && scheme == "http":
		return "; if the server expects HTTPS, give the backend an https:// URL, otherwise it is not a vLLM server"
	case status >= 400 && status < 500 && status != http.StatusTooManyRequests:
		return notVLLM
	}
	return ""
}

// connectionAdvice returns what to do about an error before the response; "" for errors that a
// running replica may cause. hasResponded reports whether the backend has passed a check before.
func connectionAdvice(err error, scheme string, hasResponded bool) string {
	switch {
	case errors.As(err, new(tls.RecordHeaderError)):
		return "; the server expects plain HTTP: give the backend an http:// URL"
	case errors.As(err, new(x509.HostnameError)):
		return "; use a certificate with a subject alternative name for the host, or set the backend's server_name to one that it has"
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return "; set the backend's ca_file to the certificate of the authority, or to the server's own if that is self-signed"
	case scheme == "http" && !hasResponded && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET)):
		return "; if the server expects HTTPS, give the backend an https:// URL"
	}
	return ""
}

// newLoopError returns the error for a path to which the proxy with that instance id returned 508.
func (c *Checker) newLoopError(path, instance string) error {
	switch instance {
	case "":
		return fmt.Errorf("%s returned 508: the backend leads back to a proxy (loop)", path)
	case c.Instance:
		return fmt.Errorf("%s returned 508: the backend is this proxy itself (loop); remove it from the backends", path)
	}
	return fmt.Errorf("%s returned 508: the backend has this proxy among its own backends (loop); remove one of the two", path)
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}
