package backends

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"sync"
	"time"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
)

const (
	maxMissedPolls      = 3                // in a row; then the load is unknown
	noMetricsInterval   = 10 * time.Second // of a replica without /metrics
	defaultPollInterval = time.Second
	defaultFastInterval = 250 * time.Millisecond

	defaultMaxMetricsBytes = 16 << 20
)

var errNoMetrics = errors.New("the replica has no /metrics (404)")

// Poller keeps the backends' Loads up to date from the replicas' /metrics. It
// corrects the router's own counts and never makes a backend Down: after
// maxMissedPolls, or without a /metrics, Load is nil, which means unknown.
//
// Do not change the fields once Watch was called. The callbacks run in the
// goroutine that polls their backend, so they delay only its next poll.
// OnCacheLost is called after the new Load is set and before OnLoad.
type Poller struct {
	MaxBytes int64 // of one response; 0: 16 MiB

	Logger *slog.Logger // nil: silent

	// OnPoll is called first after a poll, and may change the Parts of b. The others are called for
	// each of these. nil: none is.
	OnPoll func(ctx context.Context, b *Backend, l *Load)

	OnLoad  func(b *Backend, l *Load)
	OnError func(b *Backend, err error) // one poll failed

	// IsExpected reports, after OnLoad, whether the new Load is what the caller expected:
	// then the next poll can wait longer. nil: it never can.
	IsExpected func(b *Backend) bool

	// OnOutOfDescriptors is called when a poll could not be made because this
	// process has no file descriptor left. It counts as no miss.
	OnOutOfDescriptors func(err error)

	// OnCacheLost is called when the replica's prefix cache is gone: the process restarted, a
	// counter decreased, the engine went to sleep, or the cache changed its size.
	OnCacheLost func(b *Backend, reason string)

	settings setting[PollSettings]
	readers  sync.Pool // of *bufio.Reader
}

// PollSettings configure a Poller. Zero means the default.
type PollSettings struct {
	// from the end of a poll to the next, up to MaxPollInterval while they show nothing new; 1 s
	Interval time.Duration `mapstructure:"interval" range:"10ms.."`
	// while a backend has external load or waits for room in its KV cache; 250 ms
	FastInterval time.Duration `mapstructure:"fast_interval" range:"10ms.."`
	Timeout      time.Duration `mapstructure:"timeout" range:"1ms.."` // of one poll, body included; Interval
}

// SetSettings applies from the next poll on; current waits restart.
func (p *Poller) SetSettings(s PollSettings) { p.settings.set(s) }

// Watch polls b at once and then until ctx is done. Call it once per backend,
// each in its own goroutine, in which a poll ends before the next begins: a slow
// replica is then polled less often, never twice at once, and delays no other.
func (p *Poller) Watch(ctx context.Context, b *Backend) {
	w := pollState{Poller: p, backend: b, log: backendLogger(p.Logger, b)}
	for ctx.Err() == nil {
		settings, changed := p.settings.get()
		interval := cmp.Or(settings.Interval, defaultPollInterval)
		load, err := w.poll(ctx, cmp.Or(settings.Timeout, interval))
		if ctx.Err() != nil {
			return
		}
		w.applyPollResult(ctx, load, err)
		w.interval = w.nextInterval(settings)
		requested := b.pollRequested
		if w.noMetrics {
			requested = nil
		}
		wait, polled := jitter(w.interval), time.Now()
		if sleep(ctx, wait, requested, changed) {
			w.interval = 0
			sleep(ctx, min(jitter(interval), wait-time.Since(polled)), nil, changed)
		}
	}
}

// pollState is a Poller's state of one backend between polls.
type pollState struct {
	*Poller
	backend *Backend
	log     *slog.Logger

	last      map[*Backend]*Load // the last good poll of each of its parts, even if outdated
	misses    int                // since then
	noMetrics bool
	interval  time.Duration // until the next poll, without jitter; 0: that of the settings
}

// applyPollResult records the outcome of a poll and calls the callbacks.
func (w *pollState) applyPollResult(ctx context.Context, load *Load, err error) {
	switch {
	case err == nil:
	case transport.IsOutOfDescriptors(err):
		if w.OnOutOfDescriptors != nil {
			w.OnOutOfDescriptors(err)
		}
		w.interval = 0
		return
	default:
		w.recordMissedPoll(err)
		return
	}
	if w.backend.Load() == nil && len(w.last) > 0 {
		w.log.Info("polls recovered")
	}
	if w.OnPoll != nil {
		w.OnPoll(ctx, w.backend, load)
	}
	w.misses, w.noMetrics = 0, false
	before := w.last
	w.last = map[*Backend]*Load{}
	for _, m := range w.backend.Parts() {
		if l := m.loadIn(load); l != nil {
			w.applyLoad(m, before[m], l)
		} else {
			m.SetLoad(nil)
		}
	}
	w.backend.SetLoad(load) // at last, and after the callbacks, because PollUntil returns then
}

// applyLoad records the load of a part, where before is the one before it.
func (w *pollState) applyLoad(b *Backend, before, load *Load) {
	if load.Asleep {
		load.AsleepSince = load.PolledAt
		if before != nil && before.Asleep {
			load.AsleepSince = before.AsleepSince
		}
	}
	w.last[b] = load
	ended := before != nil && processEndReason(before, load) != ""
	if ended {
		b.SetVersion("")
		b.RequestCheck() // which reads it
	}
	if ended || before != nil && before.Asleep && !load.Asleep {
		b.SetSuspension(NotSuspended) // another process or operator has ended it
	}
	b.load.Store(load)
	if reason := cacheLossReason(before, load); reason != "" {
		backendLogger(w.Logger, b).Info("prefix cache reset", "reason", reason)
		b.ForgetMissingEndpoints()
		if w.OnCacheLost != nil {
			w.OnCacheLost(b, reason)
		}
	}
	if w.OnLoad != nil {
		w.OnLoad(b, load)
	}
}

// recordMissedPoll counts a failed poll and calls OnError. After maxMissedPolls, or if
// there is no /metrics, the load becomes unknown.
func (w *pollState) recordMissedPoll(err error) {
	w.misses++
	hadNoMetrics := w.noMetrics
	w.noMetrics = errors.Is(err, errNoMetrics)
	parts := w.backend.Parts()
	if w.misses == maxMissedPolls || w.noMetrics && !hadNoMetrics {
		w.backend.SetLoad(nil)
		for _, m := range parts {
			m.SetLoad(nil)
		}
		w.log.Warn("poll failed", "reason", err.Error())
	}
	if w.OnError != nil {
		for _, m := range parts {
			w.OnError(m, err)
		}
	}
}

// nextInterval returns the time until the next poll: the shortest of those that the parts need.
func (w *pollState) nextInterval(s PollSettings) time.Duration {
	switch {
	case w.noMetrics:
		return noMetricsInterval
	case w.misses > 0 || len(w.last) == 0:
		return s.NextInterval(w.interval, nil, false)
	}
	shortest := time.Duration(math.MaxInt64)
	for m, load := range w.last {
		shortest = min(shortest, s.NextInterval(w.interval, load, w.IsExpected != nil && w.IsExpected(m)))
	}
	return shortest
}

// poll reads the replica's /metrics once.
func (w *pollState) poll(ctx context.Context, timeout time.Duration) (*Load, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	before, sent := countInFlight(w.backend), time.Now()
	var load Load
	var readErr error
	err := w.backend.GetStream(ctx, "/metrics", "text/plain;version=0.0.4", func(status int, body io.Reader) error {
		load, readErr = w.readLoad(status, body)
		return readErr
	})
	switch {
	case err != nil && err == readErr:
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("/metrics: %w", err)
	}
	load.PolledAt = sent
	for i := range load.PerEngine {
		load.PerEngine[i].PolledAt = sent
	}
	// The replica may have counted requests that were sent or ended meanwhile;
	// they must not be taken for other clients'.
	now := countInFlight(w.backend)
	load.OwnInFlight = max(before.all, now.all)
	for i, part := range before.parts {
		if own := part.loadIn(&load); own != nil && own != &load {
			own.OwnInFlight = max(before.ofPart[i], part.KnownInFlight())
		}
	}
	return &load, nil
}

// readLoad reads a response to a poll.
func (w *pollState) readLoad(status int, body io.Reader) (Load, error) {
	if status == http.StatusNotFound {
		return Load{}, errNoMetrics
	}
	if status != http.StatusOK {
		return Load{}, fmt.Errorf("/metrics returned %d", status)
	}
	// The buffer is needed only while this is read, so that a hundred idle backends share a few.
	br, ok := w.readers.Get().(*bufio.Reader)
	if !ok {
		br = bufio.NewReaderSize(nil, vllm.MaxLineBytes)
	}
	defer w.readers.Put(br)
	maxBytes := cmp.Or(w.MaxBytes, defaultMaxMetricsBytes)
	br.Reset(http.MaxBytesReader(nil, io.NopCloser(body), maxBytes))
	load, err := vllm.ParseMetrics(br)
	br.Reset(nil) // do not keep the body in the pool
	if _, long := errors.AsType[*http.MaxBytesError](err); long {
		return load, fmt.Errorf("/metrics is longer than %d bytes", maxBytes)
	}
	if err != nil {
		return load, fmt.Errorf("/metrics: %w", err)
	}
	return load, nil
}

// inFlight is how many sequences are in flight on a server, and on each of its parts.
type inFlight struct {
	all    int64
	parts  []*Backend
	ofPart []int64
}

func countInFlight(server *Backend) inFlight {
	n := inFlight{all: server.KnownInFlight(), parts: server.separateParts()}
	for _, part := range n.parts {
		n.ofPart = append(n.ofPart, part.KnownInFlight())
		n.all += n.ofPart[len(n.ofPart)-1]
	}
	return n
}

// cacheLossReason compares two polls of one replica and returns why the cache
// of the first is gone, or "". before is nil at the first poll.
func cacheLossReason(before, now *Load) (reason string) {
	if now.Asleep && (before == nil || !before.Asleep) {
		return "the engine is asleep"
	}
	if before == nil {
		return ""
	}
	if reason := processEndReason(before, now); reason != "" {
		return reason
	}
	if before.CacheTokens != 0 && now.CacheTokens != 0 && before.CacheTokens != now.CacheTokens {
		return fmt.Sprintf("cache size changed from %d to %d tokens", before.CacheTokens, now.CacheTokens)
	}
	return ""
}

// processEndReason compares two polls of one backend and returns why the second is of another process, or "".
func processEndReason(before, now *Load) (reason string) {
	switch {
	case before.StartTime != 0 && now.StartTime != 0 && before.StartTime != now.StartTime:
		return "replica restarted"
	case before.TokensKnown && now.TokensKnown &&
		(now.PromptTokens < before.PromptTokens || now.GenerationTokens < before.GenerationTokens),
		before.PrefixKnown && now.PrefixKnown && now.PrefixQueries < before.PrefixQueries:
		// In multiprocess mode, without a start time, only this indicates a restart.
		return "a counter decreased"
	}
	return ""
}
