package kvevents

import (
	"context"
	"log/slog"
	"time"
)

// Handler receives what one publisher says, in order, from the goroutine that calls
// Subscriber.Run. A call delays the next; the publisher buffers meanwhile.
type Handler interface {
	// Restart means that nothing that was applied before counts any more: the publisher
	// restarted, or batches were lost. It is called before the first Apply, too. If complete,
	// everything that the replica holds is announced from now on; else it may hold blocks
	// that no event names.
	Restart(complete bool)

	// Apply hands over the next batch. b and all that it refers to, except strings, are valid
	// until Apply returns.
	Apply(b *Batch)
}

// Source names a publisher of KV cache events.
type Source struct {
	Rank     int    // data-parallel rank
	Endpoint string // of live events: tcp://HOST:PORT
	Replay   string // of earlier events: tcp://HOST:PORT; "": none
	Topic    string // prefix of the topics to subscribe to; "": all
}

// Subscriber follows one publisher. Set its fields before Run and do not change them.
type Subscriber struct {
	Source  Source
	Handler Handler
	Logger  *slog.Logger // nil: silent
}

// Stats are a Subscriber's counts since its Run began.
type Stats struct {
	Connected    bool      // to the endpoint of live events
	Sequence     int64     // of the last batch that was received; -1: none
	LastMessage  time.Time // when that was; zero: never
	Batches      uint64    // applied, without those that were empty
	Blocks       uint64    // stored and removed by them
	Gaps         uint64    // places where batches were missing or invalid
	Replays      uint64    // requests to the replay endpoint
	LostBatches  uint64    // missing or invalid, and not filled by a replay
	Restarts     uint64    // calls of Handler.Restart
	LastError    error     // nil: none so far
	LastErrorAt  time.Time
}

// Run follows the publisher until ctx ends, and reconnects for ever. All calls of Handler come
// from the goroutine that calls Run, one Run at a time.
func (s *Subscriber) Run(ctx context.Context) {
	<-ctx.Done()
}

// Stats returns the present counts. Safe for concurrent use.
func (s *Subscriber) Stats() Stats {
	return Stats{Sequence: -1}
}
