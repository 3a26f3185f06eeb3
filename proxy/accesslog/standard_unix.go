//go:build unix

package accesslog

import (
	"os"
	"syscall"
)

// standard is another descriptor of a standard stream: Go ends a process that
// writes to the original when nobody reads it any more.
func standard(stream *os.File) (*os.File, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := syscall.Dup(int(stream.Fd()))
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), stream.Name()), nil
}
