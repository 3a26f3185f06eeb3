package transport

import (
	"errors"
	"io"
	"os"
	"time"
)

// ErrNotYet says that nothing of a body came for a while, and that it goes on.
var ErrNotYet = errors.New("nothing to read yet")

// receiveData reads body bytes into p: buffered ones, or else straight from the
// socket, never beyond what is known to be body.
func (b *Body) receiveData(p []byte) (int, error) {
	if b.state == untilClose {
		return b.receive(p, time.Time{})
	}
	n, err := b.receive(p[:min(int64(len(p)), b.left)], time.Time{})
	if b.left -= int64(n); b.left == 0 {
		if b.state == counted {
			b.state = ended
		} else {
			b.state = chunkEnd
		}
	}
	return n, err
}

// receive reads once: into p, or with a nil p one byte more than is buffered into
// the buffer. It fails with ErrNotYet at until (zero: never), and with
// os.ErrDeadlineExceeded when the idle timeout ends before.
func (b *Body) receive(p []byte, until time.Time) (n int, err error) {
	if p != nil && b.br.Buffered() > 0 {
		return b.br.Read(p)
	}
	limit, late := b.arm(until)
	for {
		if p != nil {
			n, err = b.br.Read(p)
		} else {
			_, err = b.br.Peek(b.br.Buffered() + 1)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if !time.Now().Before(limit) {
			return 0, late
		}
		b.setDeadline(limit) // the one in force was early
	}
	switch {
	case err == nil:
		b.silent = time.Time{}
	case err != io.EOF:
	case b.state == untilClose:
		b.state, err = ended, nil
	default:
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// arm sees to it that the next read times out at limit or up to a quarter of the
// wait before, so that a busy stream seldom pays for setting a deadline. late is
// what it means that limit passed.
func (b *Body) arm(until time.Time) (limit time.Time, late error) {
	if b.idle == 0 && b.quiet == 0 && until.IsZero() {
		if !b.armed.IsZero() {
			b.setDeadline(time.Time{})
		}
		return limit, nil
	}
	now := time.Now()
	if b.silent.IsZero() {
		b.silent = now
	}
	if until.IsZero() && b.quiet > 0 {
		until = now.Add(b.quiet)
	}
	limit, late = until, ErrNotYet
	if idleEnd := b.silent.Add(b.idle); b.idle > 0 && (until.IsZero() || !idleEnd.After(until)) {
		limit, late = idleEnd, os.ErrDeadlineExceeded
	}
	// A deadline that has passed would fail even if bytes lie in the socket.
	if soonest := now.Add(time.Millisecond); limit.Before(soonest) {
		limit = soonest
	}
	if early := limit.Sub(b.armed); !b.armed.After(now) || early < 0 || early > limit.Sub(now)/4 {
		b.setDeadline(limit)
	}
	return limit, late
}

func (b *Body) setDeadline(at time.Time) {
	b.armed = at
	b.c.SetReadDeadline(at) // fails only on a closed socket, as the read will
}
