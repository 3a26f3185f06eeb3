//go:build (amd64 || arm64) && !race

// Package netio reads and writes connected sockets without telling Go's scheduler.
//
// Package net enters each system call as one that may block: another thread may
// take over the processor meanwhile, and the runtime's monitor is woken to see to
// it, 10,000 times a second where calls are many and short. But a socket of Go's
// does not block. What is left out here is a fifth of what it costs to pass on a
// chunk of a stream. And recv and send, which know that it is a socket, cost less
// than read and write. Waiting, deadlines and closing are package net's, as are
// their errors.
package netio

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// mostAtOnce bounds what a call moves: for so long the scheduler knows nothing.
const mostAtOnce = 32 << 10

// Reader reads a connection. One goroutine at a time may use it.
type Reader struct {
	conn net.Conn
	raw  syscall.RawConn

	// What try works with. It is made once, so that a read allocates nothing.
	try  func(fd uintptr) (over bool)
	p    []byte
	n    int
	errn syscall.Errno
}

// NewReader returns a Reader of c, or nil: then c itself is to be read.
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

// Read is c.Read.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return r.conn.Read(p)
	}
	for {
		r.p = p[:min(len(p), mostAtOnce)]
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

// Writer begins writes to a connection.
type Writer struct {
	raw syscall.RawConn

	busy sync.Mutex // guards what try works with
	try  func(fd uintptr) (over bool)
	p    []byte
	n    int
}

// NewWriter returns a Writer to c, which may be nil.
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
		return true // whatever came of it
	}
	return w
}

// Begin writes as much of p as the socket takes at once, and returns how much that
// is. The rest is left to c.Write, which also finds out what is wrong. A nil Writer
// leaves all of it.
func (w *Writer) Begin(p []byte) int {
	if w == nil || len(p) == 0 || len(p) > mostAtOnce || !w.busy.TryLock() {
		return 0
	}
	defer w.busy.Unlock()
	w.p, w.n = p, 0
	err := w.raw.Write(w.try)
	if w.p = nil; err != nil {
		return 0
	}
	return w.n
}

// rawConn is c's socket, nil if it has none that is open.
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
