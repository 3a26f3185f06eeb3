//go:build unix

package transport

import "syscall"

// probeIdleSocket reports whether an idle socket is open and has nothing to read. Go's
// sockets are non-blocking, so the read returns at once. If it consumes a byte, the
// connection is unusable anyway.
func probeIdleSocket(fd uintptr) (idle bool) {
	var b [1]byte
	_, err := syscall.Read(int(fd), b[:])
	return err == syscall.EAGAIN
}
