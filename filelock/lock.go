package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	// lockSuffix ends the name of the file that is locked for another one.
	lockSuffix = ".lock"
	// lockRetryInterval is how often SaveEvery tries to lock.
	lockRetryInterval = 100 * time.Millisecond
)

// Lock excludes other processes from a file that may be replaced as a whole: it locks a second file beside it. It is not
// safe for concurrent use.
type Lock struct {
	path string
	file *os.File // nil: not locked
}

// NewLock returns the Lock of the file at path, not locked.
func NewLock(path string) Lock { return Lock{path: path} }

// TryLock locks for this process, or returns why it cannot. It does nothing if this Lock is locked. It does not block.
func (l *Lock) TryLock() (err error) {
	if l.file != nil {
		return nil
	}
	if l.file, err = TryOpen(l.path + lockSuffix); errors.Is(err, ErrLocked) {
		return fmt.Errorf("another process writes %s: stop it, or set another file for one of the two", l.path)
	}
	return err
}

// Acquire locks for this process. It blocks while another one has locked, until ctx is done. It must not be called on a
// Lock that is locked.
func (l *Lock) Acquire(ctx context.Context) (err error) {
	l.file, err = Open(ctx, l.path+lockSuffix)
	return err
}

// Unlock leaves the file to other processes.
func (l *Lock) Unlock() {
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// SaveEvery calls save after each interval until ctx is done, and tryLock often until it reports that it is done: a
// predecessor may have locked the file.
func SaveEvery(ctx context.Context, interval time.Duration, tryLock func() (done bool), save func()) {
	saves := time.NewTicker(interval)
	defer saves.Stop()
	locks := time.NewTicker(lockRetryInterval)
	defer locks.Stop()
	for {
		select {
		case <-locks.C:
			if tryLock() {
				locks.Stop()
			}
		case <-saves.C:
			save()
		case <-ctx.Done():
			return
		}
	}
}
