package http1_test

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// wire is one direction of a connection in memory. It hands out segments as they
// were written and takes any number of them, like a socket with large buffers; what
// waits on it waits durably in a bubble of synctest.
type wire struct {
	mu       sync.Mutex // guards what follows
	changed  sync.Cond
	segments [][]byte
	ended    bool // by the writer
	left     bool // by the reader
	until    [2]time.Time
	timer    *time.Timer
}

// The ends of a wire, of which each has a deadline.
const (
	reading = iota
	writing
)

func newWire() *wire {
	w := new(wire)
	w.changed.L = &w.mu
	return w
}

func (w *wire) late(end int) bool {
	return !w.until[end].IsZero() && !time.Now().Before(w.until[end])
}

func (w *wire) read(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		switch {
		case w.left:
			return 0, net.ErrClosed
		case w.late(reading):
			return 0, os.ErrDeadlineExceeded
		case len(w.segments) > 0:
			n := copy(p, w.segments[0])
			if w.segments[0] = w.segments[0][n:]; len(w.segments[0]) == 0 {
				w.segments = w.segments[1:]
			}
			return n, nil
		case w.ended:
			return 0, io.EOF
		}
		w.changed.Wait()
	}
}

func (w *wire) write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.ended:
		return 0, net.ErrClosed
	case w.late(writing):
		return 0, os.ErrDeadlineExceeded
	case w.left:
		return 0, syscall.EPIPE
	case len(p) > 0:
		w.segments = append(w.segments, append([]byte(nil), p...))
		w.changed.Broadcast()
	}
	return len(p), nil
}

func (w *wire) setDeadline(end int, at time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.until[end] = at
	if end == reading {
		if w.timer != nil {
			w.timer.Stop()
		}
		if !at.IsZero() {
			w.timer = time.AfterFunc(time.Until(at), w.changed.Broadcast)
		}
	}
	w.changed.Broadcast()
	return nil
}

func (w *wire) end(by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if by == reading {
		w.left = true
		w.segments = nil
		if w.timer != nil {
			w.timer.Stop()
		}
	} else {
		w.ended = true
	}
	w.changed.Broadcast()
}

// end is one end of a connection: a net.Conn.
type end struct{ in, out *wire }

func connection() (client, server *end) {
	up, down := newWire(), newWire()
	return &end{down, up}, &end{up, down}
}

func (e *end) Read(p []byte) (int, error)         { return e.in.read(p) }
func (e *end) Write(p []byte) (int, error)        { return e.out.write(p) }
func (e *end) SetReadDeadline(at time.Time) error { return e.in.setDeadline(reading, at) }
func (e *end) SetWriteDeadline(at time.Time) error {
	return e.out.setDeadline(writing, at)
}

func (e *end) SetDeadline(at time.Time) error {
	_ = e.SetReadDeadline(at)
	return e.SetWriteDeadline(at)
}

func (e *end) Close() error {
	e.in.end(reading)
	e.out.end(writing)
	return nil
}

func (e *end) CloseWrite() error {
	e.out.end(writing)
	return nil
}

func (e *end) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }
func (e *end) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8080} }

// door is a net.Listener to which connections are handed.
type door struct {
	conns  chan net.Conn
	faults chan error // what Accept fails with
	closed chan struct{}
	once   sync.Once
}

func newDoor() *door {
	return &door{conns: make(chan net.Conn), faults: make(chan error), closed: make(chan struct{})}
}

func (d *door) dial() *end {
	client, server := connection()
	d.conns <- server
	return client
}

func (d *door) Accept() (net.Conn, error) {
	select {
	case c := <-d.conns:
		return c, nil
	case err := <-d.faults:
		return nil, err
	case <-d.closed:
		return nil, net.ErrClosed
	}
}

func (d *door) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

func (d *door) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }
