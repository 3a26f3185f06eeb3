package backends

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"warmroute/backends/transport"
)

const (
	missesUntilStale = 3                // polls in a row
	noMetricsWait    = 10 * time.Second // for a replica that has no /metrics
)

var errNoMetrics = errors.New("the replica has no /metrics (404)")

// Poller keeps the backends' Loads up to date from the replicas' /metrics. It
// corrects what the router counts itself and never makes a backend Down: after
// three missed polls, or when there is no /metrics, Load is nil, which means
// unknown.
//
// The fields are not to be changed once Follow was called. The callbacks run in
// the goroutine that polls their backend, so they delay only its next poll. OnLost
// comes after the new Load is set and before OnLoad.
type Poller struct {
	MaxBytes int64 // of one answer; 0: 16 MiB

	Logger *slog.Logger // nil: silent

	OnLoad  func(b *Backend, l *Load)
	OnError func(b *Backend, err error) // one poll failed

	// OutOfDescriptors is called when a poll could not be made because this process
	// has no file descriptor left. It counts as no miss. nil: not called.
	OutOfDescriptors func(err error)

	// OnLost is called when the replica's prefix cache is gone: the process
	// started anew, a counter ran backwards, the engine went to sleep, or its
	// cache changed its size.
	OnLost func(b *Backend, reason string)

	pace    changing[PollPace]
	readers sync.Pool // of *bufio.Reader
}

// PollPace is how often a Poller looks, and how long. Zero means the default.
type PollPace struct {
	Interval     time.Duration // from the end of a poll to the next; 1 s
	FastInterval time.Duration // while a backend has foreign load or a queue; 250 ms
	Timeout      time.Duration // of one poll, body included; Interval
}

// SetPace holds from the next poll on; those who wait for it wait anew.
func (p *Poller) SetPace(pace PollPace) { p.pace.set(pace) }

// Follow polls b at once and then until ctx is done. One call a backend, each in
// a goroutine of its own in which a poll ends before the next begins: so a slow
// replica is polled less often, never twice at once, and delays no other.
func (p *Poller) Follow(ctx context.Context, b *Backend) {
	w := watch{Poller: p, backend: b}
	for {
		pace, changed := p.pace.get()
		if !w.poll(ctx, cmp.Or(pace.Timeout, pace.Interval, time.Second)) ||
			!restUnlessChanged(ctx, jitter(w.wait(pace)), changed) {
			return
		}
	}
}

// reader returns a buffer for one scrape. It is needed only while that is read,
// so a hundred idle backends share a few.
func (p *Poller) reader() *bufio.Reader {
	if br, ok := p.readers.Get().(*bufio.Reader); ok {
		return br
	}
	return bufio.NewReaderSize(nil, maxLine)
}

// watch is what the Poller remembers of one backend between polls.
type watch struct {
	*Poller
	backend *Backend

	last      *Load // the last good scrape, also when it is stale by now
	misses    int   // since then
	noMetrics bool
}

// poll scrapes once and tells what came of it. It reports whether ctx lasted.
func (w *watch) poll(ctx context.Context, limit time.Duration) bool {
	load, err := w.scrape(ctx, limit)
	if ctx.Err() != nil {
		return false
	}
	if transport.IsOutOfDescriptors(err) {
		if w.OutOfDescriptors != nil {
			w.OutOfDescriptors(err)
		}
		return true
	}
	if err != nil {
		w.miss(err)
		return true
	}
	if w.backend.Load() == nil && w.last != nil {
		w.log(slog.LevelInfo, "load known again")
	}
	lost := lostCache(w.last, load)
	w.last, w.misses, w.noMetrics = load, 0, false
	w.backend.SetLoad(load)
	if lost != "" {
		w.log(slog.LevelWarn, "prefix cache lost", "reason", lost)
		if w.OnLost != nil {
			w.OnLost(w.backend, lost)
		}
	}
	if w.OnLoad != nil {
		w.OnLoad(w.backend, load)
	}
	return true
}

func (w *watch) miss(err error) {
	w.misses++
	had := w.noMetrics
	w.noMetrics = errors.Is(err, errNoMetrics)
	if w.misses == missesUntilStale || w.noMetrics && !had {
		w.backend.SetLoad(nil)
		w.log(slog.LevelWarn, "load unknown", "reason", err.Error())
	}
	if w.OnError != nil {
		w.OnError(w.backend, err)
	}
}

// wait is how long to leave the replica alone. Each scrape costs it milliseconds
// of its event loop, so it is asked often only while the answer matters: when
// others send it requests too, or it has more than it can run.
func (w *watch) wait(pace PollPace) time.Duration {
	switch l := w.last; {
	case w.noMetrics:
		return noMetricsWait
	case l != nil && w.misses == 0 && l.QueuesKnown && (l.Waiting > 0 || int64(l.Running) > l.OwnInFlight):
		return cmp.Or(pace.FastInterval, 250*time.Millisecond)
	}
	return cmp.Or(pace.Interval, time.Second)
}

func (w *watch) scrape(ctx context.Context, limit time.Duration) (*Load, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	before, sent := w.backend.InFlight.Load(), time.Now()
	res, err := w.backend.get(ctx, "/metrics", "text/plain;version=0.0.4", "")
	if err != nil {
		return nil, fmt.Errorf("scrape: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("scrape: %w", errNoMetrics)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scrape: /metrics answered %d", res.StatusCode)
	}
	br := w.reader()
	defer w.readers.Put(br)
	most := cmp.Or(w.MaxBytes, 16<<20)
	br.Reset(http.MaxBytesReader(nil, res.Body, most))
	load, err := ParseMetrics(br)
	br.Reset(nil) // or the pool would keep the body
	if isTooLong(err) {
		return nil, fmt.Errorf("scrape: /metrics is longer than %d bytes", most)
	}
	if err != nil {
		return nil, fmt.Errorf("scrape: %w", err)
	}
	// What was sent or ended meanwhile may be among what the replica counted; it
	// must not be taken for other clients'.
	load.OwnInFlight, load.ScrapedAt = max(before, w.backend.InFlight.Load()), sent
	if load.Asleep {
		load.AsleepSince = sent
		if w.last != nil && w.last.Asleep {
			load.AsleepSince = w.last.AsleepSince
		}
	}
	return &load, nil
}

func (w *watch) log(level slog.Level, message string, fields ...any) {
	if w.Logger != nil {
		w.Logger.Log(context.Background(), level, message, append([]any{"backend", w.backend.Name}, fields...)...)
	}
}

// lostCache compares two scrapes of one replica and says why what it had cached
// before is gone, or returns "". before is nil for the first scrape.
func lostCache(before, now *Load) string {
	if now.Asleep && (before == nil || !before.Asleep) {
		return "the engine is asleep"
	}
	if before == nil {
		return ""
	}
	switch {
	case before.StartTime != 0 && now.StartTime != 0 && before.StartTime != now.StartTime:
		return "the process started anew"
	case before.TokensKnown && now.TokensKnown &&
		(now.PromptTokens < before.PromptTokens || now.GenerationTokens < before.GenerationTokens),
		before.PrefixKnown && now.PrefixKnown && now.PrefixQueries < before.PrefixQueries:
		// In multiprocess mode there is no start time, and this is the sign.
		return "a counter ran backwards"
	case before.CacheTokens != 0 && now.CacheTokens != 0 && before.CacheTokens != now.CacheTokens:
		return fmt.Sprintf("the cache changed from %d to %d tokens", before.CacheTokens, now.CacheTokens)
	}
	return ""
}
