// Package filelock locks files against other processes.
//
// A usage file and a recording are locked themselves, and not a file beside them, so that the lock stays with what is
// renamed. github.com/gofrs/flock (0.13) locks a file that it opens and keeps to itself: each would be opened twice and
// the two compared, on Windows its lock would refuse the other descriptor the first byte, and a file system without
// locks is an error. What it would replace are the 31 lines of flock.go and flock_other.go.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"warmroute/clock"
)

// ErrLocked is returned for a file that is locked by another process or through another descriptor.
var ErrLocked = errors.New("locked by another process")

// openInterval is how often Open tries: most locks are held for milliseconds.
const openInterval = 10 * time.Millisecond

// Open opens the file at path for reading and writing, locked until it is closed. It creates the file if there is none.
// It blocks while another process has locked it, until ctx is done. On a file system without locks the file is not locked.
func Open(ctx context.Context, path string) (*os.File, error) {
	for {
		file, err := TryOpen(path)
		if !errors.Is(err, ErrLocked) {
			return file, err
		}
		if !clock.Sleep(ctx, openInterval) {
			return nil, fmt.Errorf("open %s: %w: %w", path, err, context.Cause(ctx))
		}
	}
}

// TryOpen is Open, but returns ErrLocked if another process has locked the file. It does not block.
func TryOpen(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockNamed(file); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// lockNamed locks an opened file. It returns ErrLocked as well if another process, which had locked it, has renamed,
// replaced or removed it since it was opened.
func lockNamed(file *os.File) error {
	if err := lock(file); err != nil {
		return err
	}
	opened, err := file.Stat()
	if err != nil {
		return err
	}
	if named, err := os.Stat(file.Name()); err != nil || !os.SameFile(opened, named) {
		return ErrLocked
	}
	return nil
}
