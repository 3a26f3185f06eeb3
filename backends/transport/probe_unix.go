//go:build unix

package transport

import "syscall"

// silent reports whether an idle socket is open and has nothing to read. Go's
// sockets don't block, so the read returns at once. It may eat a byte: then the
// connection is of no use anyway.
func isSilent(fd uintptr) bool {
	var b [1]byte
	_, err := syscall.Read(int(fd), b[:])
	return err == syscall.EAGAIN
}
