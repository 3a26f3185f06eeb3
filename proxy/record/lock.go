//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package record

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// lock keeps every other process from recording to file until it is closed.
// On a disk that knows no locks it does nothing.
func lock(file *os.File) error {
	err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case err == syscall.EWOULDBLOCK:
		return fmt.Errorf("another process records to %s; stop it, or choose another file for one of the two", file.Name())
	case err == nil || errors.Is(err, errors.ErrUnsupported):
		return nil
	}
	return fmt.Errorf("lock %s: %w", file.Name(), err)
}
