//go:build unix

package accesslog

import (
	"os"

	"golang.org/x/sys/unix"
)

// duplicate returns another descriptor of a standard stream. Go ends a process that
// writes to the original descriptor after its reader has closed it.
func duplicate(stream *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(stream.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), stream.Name()), nil
}
