package netio

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// pair is both ends of a connection over loopback.
func pair(t testing.TB) (ours, theirs *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// reader is how a connection is read by those who have a Reader of it.
func reader(c net.Conn) io.Reader {
	if r := NewReader(c); r != nil {
		return r
	}
	return c
}

// TestReadErrors has the two read what is the same.
func TestReadErrors(t *testing.T) {
	for name, end := range map[string]func(ours, theirs *net.TCPConn){
		"bytes": func(ours, theirs *net.TCPConn) { theirs.Write([]byte("some")) },
		"bytes, then a deadline": func(ours, theirs *net.TCPConn) {
			theirs.Write([]byte("some"))
			ours.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		},
		"a deadline":             func(ours, theirs *net.TCPConn) { ours.SetReadDeadline(time.Now().Add(50 * time.Millisecond)) },
		"a deadline that passed": func(ours, theirs *net.TCPConn) { ours.SetReadDeadline(time.Unix(1, 0)) },
		"their close":            func(ours, theirs *net.TCPConn) { theirs.Close() },
		"their reset": func(ours, theirs *net.TCPConn) {
			theirs.SetLinger(0)
			theirs.Close()
			time.Sleep(10 * time.Millisecond)
		},
		"a reset meanwhile": func(ours, theirs *net.TCPConn) {
			theirs.SetLinger(0)
			time.AfterFunc(20*time.Millisecond, func() { theirs.Close() })
		},
		"our close":       func(ours, theirs *net.TCPConn) { ours.Close() },
		"our close later": func(ours, theirs *net.TCPConn) { time.AfterFunc(20*time.Millisecond, func() { ours.Close() }) },
		"bytes later": func(ours, theirs *net.TCPConn) {
			time.AfterFunc(20*time.Millisecond, func() { theirs.Write([]byte("late")) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			read := func(with func(net.Conn) io.Reader) (string, error) {
				ours, theirs := pair(t)
				r := with(ours)
				end(ours, theirs)
				p := make([]byte, 100)
				n, err := r.Read(p)
				var of *net.OpError
				if errors.As(err, &of) && (of.Source.String() != ours.LocalAddr().String() || of.Addr.String() != theirs.LocalAddr().String()) {
					t.Errorf("%v is of another connection", err)
				} else if of != nil {
					of.Source, of.Addr = nil, nil
				}
				return string(p[:n]), err
			}
			want, wantErr := read(func(c net.Conn) io.Reader { return c })
			got, err := read(reader)
			if got != want || (err == nil) != (wantErr == nil) || err != nil && err.Error() != wantErr.Error() ||
				errors.Is(err, os.ErrDeadlineExceeded) != errors.Is(wantErr, os.ErrDeadlineExceeded) ||
				errors.Is(err, net.ErrClosed) != errors.Is(wantErr, net.ErrClosed) ||
				(err == io.EOF) != (wantErr == io.EOF) {
				t.Errorf("%q, %v; package net says %q, %v", got, err, want, wantErr)
			}
		})
	}
}

// TestReadAndWrite sends more than a socket takes to a reader that is slow.
func TestReadAndWrite(t *testing.T) {
	sent := make([]byte, 3<<20)
	rand.Read(sent)
	ours, theirs := pair(t)
	w := NewWriter(ours)
	go func() {
		defer ours.CloseWrite()
		for rest := sent; len(rest) > 0; {
			piece := rest[:min(len(rest), 20<<10)]
			n := w.TryWrite(piece)
			if m, err := ours.Write(piece[n:]); err != nil || n+m != len(piece) {
				t.Errorf("%d and %d bytes of %d, %v", n, m, len(piece), err)
				return
			}
			rest = rest[len(piece):]
		}
	}()
	time.Sleep(50 * time.Millisecond)
	got, err := io.ReadAll(reader(theirs))
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes of %d, %v", len(got), len(sent), err)
	}
}

func TestTryWriteLimits(t *testing.T) {
	f := func(name string, p []byte, spoil func(ours, theirs *net.TCPConn)) {
		t.Helper()
		ours, theirs := pair(t)
		w := NewWriter(ours)
		spoil(ours, theirs)
		if n := w.TryWrite(p); n != 0 {
			t.Errorf("%s: %d bytes", name, n)
		}
	}
	f("closed", []byte("x"), func(ours, theirs *net.TCPConn) { ours.Close() })
	f("past its deadline", []byte("x"), func(ours, theirs *net.TCPConn) { ours.SetWriteDeadline(time.Unix(1, 0)) })
	f("nothing to write", nil, func(ours, theirs *net.TCPConn) {})
	one, other := net.Pipe()
	defer one.Close()
	defer other.Close()
	if NewReader(one) != nil || NewWriter(one).TryWrite([]byte("x")) != 0 {
		t.Error("a connection without a socket has one")
	}
}
