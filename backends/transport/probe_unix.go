//go:build unix

package transport

import "syscall"

// isSilent reports whether an idle socket is open and not readable. Go's sockets are
// non-blocking, so the read returns at once. If it consumes a byte the connection is
// unusable anyway.
func isSilent(fd uintptr) bool {
	var b [1]byte
	_, err := syscall.Read(int(fd), b[:])
	return err == syscall.EAGAIN
}
