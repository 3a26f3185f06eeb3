//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package filelock

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// lock locks the file until it is closed, or returns ErrLocked. It does not block. It does nothing on a file system
// without locks.
func lock(file *os.File) error {
	err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case err == syscall.EWOULDBLOCK:
		return ErrLocked
	case err == nil || errors.Is(err, errors.ErrUnsupported):
		return nil
	}
	return fmt.Errorf("lock %s: %w", file.Name(), err)
}
