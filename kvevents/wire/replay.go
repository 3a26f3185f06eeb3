package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"warmroute/clock"
	"warmroute/kvevents/zmtp"
)

const (
	replayIdleTimeout = 2 * time.Second        // between two messages
	replayRetryDelay  = 500 * time.Millisecond // after an attempt that brought nothing
	maxReplayAttempts = 3                      // that bring nothing, in a row
	maxReplayTime     = 2 * time.Minute        // of all attempts together
	minReplayCooldown = 30 * time.Second
	maxReplayCooldown = 8 * time.Minute
)

// replayPolicy decides when the replay endpoint is asked.
type replayPolicy struct {
	notBefore time.Time     // when failed attempts are repeated; zero: the last attempts succeeded
	cooldown  time.Duration // the last one; 0 likewise
}

// fail begins a cool-down, which is twice as long after each failure in a row.
func (p *replayPolicy) fail(now time.Time) {
	p.cooldown = min(max(2*p.cooldown, minReplayCooldown), maxReplayCooldown)
	p.notBefore = now.Add(p.cooldown)
}

func (p *replayPolicy) allows(now time.Time) bool { return !now.Before(p.notBefore) }

// wantsAll reports whether it is time to request all that the publisher has kept, because
// what failed attempts should have brought is missing since.
func (p *replayPolicy) wantsAll(now time.Time) bool { return p.cooldown > 0 && p.allows(now) }

// errPublisherRestarted means that the publisher does not have the last message that was
// received, or has another one with its sequence number.
var errPublisherRestarted = errors.New("publisher restarted")

// catchUp requests what the publisher has kept from the position on, and applies it. It
// requests everything if the position is unknown or the attempts before failed. It gives up after
// a few attempts that bring nothing, and does nothing in the cool-down after that.
func (f *follower) catchUp(ctx context.Context) {
	if f.Source.Replay == "" || !f.replays.allows(time.Now()) {
		return
	}
	timeout, cancel := context.WithTimeout(ctx, maxReplayTime)
	defer cancel()
	all := !f.position.known || f.replays.wantsAll(time.Now())
	for failures := 0; failures < maxReplayAttempts && timeout.Err() == nil; {
		before := f.position
		err := f.replayOnce(timeout, all)
		switch {
		case err == nil:
			f.replays = replayPolicy{}
			return
		case ctx.Err() != nil:
			return
		case errors.Is(err, errPublisherRestarted):
			all = true
			failures++
		case f.position != before: // the publisher drops what exceeds its send buffer
			all, failures = false, 0
		default:
			f.log.warn("KV event replay failed", err)
			failures++
			clock.Sleep(timeout, replayRetryDelay)
		}
	}
	f.replays.fail(time.Now())
}

// replayOnce requests what the publisher has kept from the position on, or from its first message if all is
// true, and applies the messages until the publisher ends them, one is missing or the next takes too long.
func (f *follower) replayOnce(ctx context.Context, all bool) error {
	conn, release, err := f.Source.dial(ctx, f.Source.Replay, zmtp.Dealer)
	if err != nil {
		return err
	}
	defer release()
	f.update(func(s *Stats) { s.Replays++ })
	// The last message that was received is requested again: if it is another one now, the publisher restarted.
	from, verify := f.position.next, f.position.received && !all
	switch {
	case all:
		from = 0
	case verify:
		from--
	}
	if err := conn.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("request replay at %s: %w", f.Source.Replay, err)
	}
	for first := true; ; first = false {
		m, end, err := readReplay(conn)
		switch {
		case err != nil:
			return fmt.Errorf("read replay from %s: %w", f.Source.Replay, err)
		case first && verify && (end || !f.position.samePublisher(m) || m.sequence == from && !f.position.isLast(m)):
			f.forget()
			return errPublisherRestarted
		case end:
			if !f.position.known {
				f.restart(true, 0) // nothing was published so far
			}
			return nil
		case first && verify && m.sequence == from:
			continue
		case first && all:
			f.restart(m.sequence == 0, m.sequence)
		case first && f.position.samePublisher(m) && m.sequence > f.position.next:
			f.skipTo(m) // the publisher keeps no more than the last
		case !f.position.isNext(m):
			return fmt.Errorf("read replay from %s: message %d instead of %d", f.Source.Replay, m.sequence, f.position.next)
		}
		f.apply(m)
		f.live.replayed = f.position.next
	}
}

// readReplay reads the next message of a replay.
func readReplay(conn *zmtp.Conn) (m message, end bool, err error) {
	if err := conn.SetReadDeadline(time.Now().Add(replayIdleTimeout)); err != nil {
		return message{}, false, err
	}
	frames, err := conn.ReadMessage()
	if err != nil {
		return message{}, false, err
	}
	return parseReplay(frames)
}
