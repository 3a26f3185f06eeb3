//go:build (amd64 || arm64) && !race

// Package netio reads and writes connected sockets by raw system calls.
//
// Package net enters each system call as one that may block, which involves the scheduler and wakes
// the runtime's monitor, but Go's sockets are non-blocking. Waiting, deadlines, closing and errors are
// those of package net.
//
// With package net a relayed chunk takes 17 % more CPU time (standard error 2 %; 9 % with its reads
// alone, 17 % with its writes alone, 24 % with both in another run): Go 1.26.8, 250 streams, eight
// rounds of "go run ./lab/bench --only chunks --baseline BUILD" at the same time for a build with this
// file and one with netio_other.go. A whole request takes the same with both, and so does a chunk that
// one goroutine writes and reads while nothing else runs.
package netio

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// maxCallBytes bounds the time that a call keeps the scheduler waiting.
const maxCallBytes = 32 << 10

// Reader reads a connection. One goroutine at a time may use it.
type Reader struct {
	conn net.Conn
	raw  syscall.RawConn

	// try and its arguments and results. It is created once, to avoid allocations.
	try  func(fd uintptr) (done bool)
	p    []byte
	n    int
	errn syscall.Errno
}

// NewReader returns a Reader of c, or nil if c has no socket: then read c itself.
func NewReader(c net.Conn) *Reader {
	r := &Reader{conn: c, raw: rawConn(c)}
	if r.raw == nil {
		return nil
	}
	r.try = func(fd uintptr) bool {
		n, _, errn := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&r.p[0])), uintptr(len(r.p)), 0, 0, 0)
		r.n, r.errn = int(n), errn
		return errn != syscall.EAGAIN
	}
	return r
}

// Read implements io.Reader like the Read of the connection.
func (r *Reader) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return r.conn.Read(p)
	}
	for {
		r.p = p[:min(len(p), maxCallBytes)]
		err := r.raw.Read(r.try)
		r.p = nil
		switch {
		case err != nil:
			if of, ok := err.(*net.OpError); ok {
				of.Op = "read"
			}
			return 0, err
		case r.errn == syscall.EINTR:
		case r.errn != 0:
			local, remote := r.conn.LocalAddr(), r.conn.RemoteAddr()
			return 0, &net.OpError{Op: "read", Net: local.Network(), Source: local, Addr: remote, Err: os.NewSyscallError("read", r.errn)}
		case r.n == 0:
			return 0, io.EOF
		default:
			return r.n, nil
		}
	}
}

// Writer writes to a connection without blocking.
type Writer struct {
	raw syscall.RawConn

	mu  sync.Mutex // guards what follows
	try func(fd uintptr) (done bool)
	p   []byte
	n   int
}

// NewWriter returns a Writer to c, or nil if c has no socket.
func NewWriter(c net.Conn) *Writer {
	w := &Writer{raw: rawConn(c)}
	if w.raw == nil {
		return nil
	}
	w.try = func(fd uintptr) bool {
		n, _, errn := syscall.RawSyscall6(syscall.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&w.p[0])), uintptr(len(w.p)), syscall.MSG_NOSIGNAL, 0, 0)
		if errn == 0 {
			w.n = int(n)
		}
		return true // do not wait
	}
	return w
}

// TryWrite writes as much of p as the socket accepts at once and returns the number of
// bytes. The caller writes the rest with the connection's Write, which also returns
// any error. A nil Writer writes nothing.
func (w *Writer) TryWrite(p []byte) (n int) {
	if w == nil || len(p) == 0 || len(p) > maxCallBytes || !w.mu.TryLock() {
		return 0
	}
	defer w.mu.Unlock()
	w.p, w.n = p, 0
	err := w.raw.Write(w.try)
	if w.p = nil; err != nil {
		return 0
	}
	return w.n
}

// rawConn returns c's socket, or nil if it has none.
func rawConn(c net.Conn) syscall.RawConn {
	s, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}
