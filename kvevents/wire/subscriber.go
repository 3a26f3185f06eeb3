package wire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"warmroute/clock"
	"warmroute/kvevents/zmtp"
)

const (
	minReconnectDelay = 100 * time.Millisecond
	maxReconnectDelay = 5 * time.Second
	// maxOutage is how long a connection may be missing before what was applied does not count
	// any more: until then it is probably what the replica still holds.
	maxOutage = 30 * time.Second

	warningInterval = time.Minute
)

// Handler receives what one publisher says, in order, from the goroutine that calls
// Subscriber.Run. A call delays the next; the publisher buffers meanwhile.
type Handler interface {
	// Restart means that nothing that was applied before counts any more: the publisher
	// restarted, or batches were missed. It is called before the first Apply, too. If complete,
	// everything that the replica holds is announced from now on; else it may hold blocks
	// that no event names. Restart(true) may follow Restart(false) directly.
	Restart(rank int, complete bool)

	// Apply hands over the events of the next batch, of which there is at least one. They and all
	// that they refer to, except strings, are valid until Apply returns.
	Apply(rank int, events []Event)
}

// Subscriber follows one publisher. Set its fields before Run and do not change them.
type Subscriber struct {
	Source  Source
	Handler Handler
	Logger  *slog.Logger // nil: silent

	// Accepted passes on the connections that the publisher makes, one after the other; nil: Run connects to Source.Endpoint.
	Accepted chan *Connection

	mu    sync.Mutex
	stats Stats
}

// Connection is a connection that a publisher has made.
type Connection struct {
	Conn  *zmtp.Conn
	Topic string     // of all its messages
	First [][]byte   // the first message
	Ended chan error // with room for one: gets why the Subscriber that received the Connection does not read from it any more
}

// ErrOtherTopic ends a Connection.
var ErrOtherTopic = errors.New("the topic has changed, which names the replica")

// read returns the next message.
func (c *Connection) read() ([][]byte, error) {
	return c.Conn.ReadMessageIf(MaxTopicBytes, func(topic []byte) (bool, error) {
		if string(topic) != c.Topic {
			return false, ErrOtherTopic
		}
		return true, nil
	})
}

// Stats are a Subscriber's counts since it was made.
type Stats struct {
	Connected     bool   // to the endpoint of live events
	Batches       uint64 // applied
	Blocks        uint64 // stored and removed by them
	Restarts      uint64 // calls of Handler.Restart
	Replays       uint64 // requests to the replay endpoint
	MissedBatches uint64 // missed or invalid, and not replayed; those before the first message are not counted
}

// Stats returns the present counts. Safe for concurrent use.
func (s *Subscriber) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// update changes the counts.
func (s *Subscriber) update(change func(*Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.stats)
}

// Run follows the publisher until ctx ends. It reconnects for ever and continues where it was, if the
// publisher's replay endpoint has what was missed and the outage was not too long. All calls of Handler
// come from the goroutine that calls Run. Call it once at a time.
func (s *Subscriber) Run(ctx context.Context) {
	f := newFollower(s)
	if s.Accepted != nil {
		f.followAccepted(ctx)
		return
	}
	delay := minReconnectDelay
	for {
		began := time.Now()
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		f.log.warn("KV event connection failed", err)
		f.forgetAfterOutage(time.Now())
		if time.Since(began) > maxReconnectDelay {
			delay = minReconnectDelay
		}
		if !clock.Sleep(ctx, time.Duration(float64(delay)*(0.5+rand.Float64()/2))) {
			return
		}
		delay = min(2*delay, maxReconnectDelay)
	}
}

// follower is the state of one Run.
type follower struct {
	*Subscriber
	log      *warningLog
	decoder  decoder
	position position
	live     liveStream
	replays  replayPolicy
	lostAt   time.Time // when the last connection ended
	cleared  bool      // the handler knows that nothing counts: its last call was Restart(false)
}

func newFollower(s *Subscriber) *follower {
	logger := cmp.Or(s.Logger, slog.New(slog.DiscardHandler))
	endpoint := cmp.Or(s.Source.Endpoint, "kv_events.listen")
	return &follower{Subscriber: s, log: newWarningLog(logger.With("endpoint", endpoint, "rank", s.Source.Rank))}
}

// liveStream is what was received on the present connection to the live events.
type liveStream struct {
	received bool
	last     uint64 // sequence of the last message
	replayed uint64 // what a replay has brought meanwhile: all messages before this one
}

// isDuplicate reports whether a replay has brought m before.
func (l liveStream) isDuplicate(m message) bool {
	return m.sequence < l.replayed && (!l.received || m.sequence > l.last)
}

// follow connects, and applies what the publisher sends until the connection or ctx ends.
func (f *follower) follow(ctx context.Context) error {
	conn, release, err := f.Source.dial(ctx, f.Source.Endpoint, zmtp.Sub)
	if err != nil {
		return err
	}
	defer release()
	if err := conn.WriteMessage(append([]byte{zmtp.Subscribe}, f.Source.Topic...)); err != nil {
		return fmt.Errorf("subscribe at %s: %w", f.Source.Endpoint, err)
	}
	return f.readLive(ctx, conn, nil, conn.ReadMessage)
}

// followAccepted applies what the publisher sends over the connections that it makes, until ctx ends.
func (f *follower) followAccepted(ctx context.Context) {
	for {
		var outage <-chan time.Time
		if f.position.known {
			outage = time.After(time.Until(f.lostAt.Add(maxOutage + time.Millisecond)))
		}
		select {
		case c := <-f.Accepted:
			f.followConnection(ctx, c)
		case now := <-outage:
			f.forgetAfterOutage(now)
		case <-ctx.Done():
			return
		}
	}
}

// followConnection applies what the publisher sends over a connection that it has made, until that or ctx ends.
func (f *follower) followConnection(ctx context.Context, c *Connection) {
	var err error
	defer func() { c.Ended <- err }()
	defer context.AfterFunc(ctx, func() { c.Conn.Close() })()
	if err = f.readLive(ctx, c.Conn, c.First, c.read); ctx.Err() == nil {
		f.log.warn("KV event connection failed", err)
	}
}

// readLive applies first (nil: none), and the messages that read returns from a connection to the live events.
func (f *follower) readLive(ctx context.Context, conn *zmtp.Conn, first [][]byte, read func() ([][]byte, error)) error {
	f.log.logConnected()
	f.update(func(s *Stats) { s.Connected = true })
	defer func() {
		f.lostAt = time.Now()
		f.update(func(s *Stats) { s.Connected = false })
	}()

	// Live messages wait in the kernel and in the publisher while others are replayed.
	f.live = liveStream{}
	f.catchUp(ctx)
	for frames := first; ; frames = nil {
		if frames == nil {
			readable, err := conn.WaitReadable(f.replays.notBefore)
			if err == nil && !readable { // the publisher may be idle for long
				f.catchUp(ctx)
				continue
			}
			if err == nil {
				frames, err = read()
			}
			if err != nil {
				return fmt.Errorf("read from %s: %w", conn.RemoteAddr(), err)
			}
		}
		m, err := parseLive(frames)
		if err != nil {
			return fmt.Errorf("read from %s: %w", conn.RemoteAddr(), err)
		}
		f.receive(ctx, m)
	}
}

// receive handles one live message.
func (f *follower) receive(ctx context.Context, m message) {
	duplicate := f.position.isPast(m) && f.live.isDuplicate(m)
	f.live.received, f.live.last = true, m.sequence
	if duplicate {
		return
	}
	switch restarted := f.position.isPast(m) || !f.position.samePublisher(m); {
	case m.sequence == 0 && (restarted || !f.position.known):
		f.restart(true, 0)
	case restarted:
		f.forget()
	case f.replays.wantsAll(time.Now()):
		f.catchUp(ctx)
		if f.position.isPast(m) {
			return
		}
	}
	if !f.position.isNext(m) {
		f.catchUp(ctx)
		if ctx.Err() != nil || f.position.isPast(m) {
			return
		}
		if !f.position.isNext(m) {
			f.skipTo(m)
		}
	}
	f.apply(m)
}

// apply hands over the batch of m, which is next. If it is invalid, it counts as missed: a replay would
// bring the same bytes.
func (f *follower) apply(m message) {
	events, err := f.decoder.decode(m.payload)
	if err != nil {
		f.log.warn("KV event batch invalid", err)
		f.update(func(s *Stats) { s.MissedBatches++ })
		f.restart(false, m.sequence+1)
		f.position = after(m)
		return
	}
	f.position = after(m)
	if len(events) == 0 { // a heartbeat
		return
	}
	blocks := 0
	for i := range events {
		blocks += len(events[i].Hashes)
	}
	f.update(func(s *Stats) {
		s.Batches++
		s.Blocks += uint64(blocks)
	})
	f.cleared = false
	f.Handler.Apply(f.Source.Rank, events)
}

// skipTo starts again at m, without the batches missed before it.
func (f *follower) skipTo(m message) {
	if f.position.known && m.sequence > f.position.next {
		missed := m.sequence - f.position.next
		f.update(func(s *Stats) { s.MissedBatches += missed })
	}
	f.restart(false, m.sequence)
}

// restart tells the handler that what it knows does not count, and that next comes next.
func (f *follower) restart(complete bool, next uint64) {
	f.position = position{known: true, next: next}
	if f.cleared && !complete {
		return
	}
	f.cleared = !complete
	f.update(func(s *Stats) { s.Restarts++ })
	f.Handler.Restart(f.Source.Rank, complete)
}

// forget makes the position unknown, because the publisher restarted.
func (f *follower) forget() {
	f.restart(false, 0)
	f.position = position{}
	f.live.replayed = 0
}

// forgetAfterOutage forgets what was applied if the connection has been missing for too long.
func (f *follower) forgetAfterOutage(now time.Time) {
	if f.position.known && now.Sub(f.lostAt) > maxOutage {
		f.forget()
	}
}

// warningLog logs at most one warning in warningInterval.
type warningLog struct {
	logger     *slog.Logger
	limit      rate.Sometimes
	suppressed int  // warnings since the last that was logged
	wasUp      bool // the last that was logged is that the connection is there
}

func newWarningLog(logger *slog.Logger) *warningLog {
	return &warningLog{logger: logger, limit: rate.Sometimes{Interval: warningInterval}}
}

func (l *warningLog) warn(message string, err error) {
	l.suppressed++
	l.limit.Do(func() {
		l.logger.Warn(message, "err", err, "suppressed", l.suppressed-1)
		l.suppressed, l.wasUp = 0, false
	})
}

// logConnected logs that the connection is there, at first and after a warning.
func (l *warningLog) logConnected() {
	if !l.wasUp {
		l.logger.Info("KV events connected")
		l.wasUp = true
	}
}
