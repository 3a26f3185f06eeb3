package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"warmroute/config"
	"warmroute/filelock"
	"warmroute/router/snapshot"
)

// snapshotEvery bounds what a proxy that is killed outright forgets.
const snapshotEvery = time.Minute

// snapshotTemp ends the names of files that are being written; what comes
// before it differs, so that two proxies do not meet on a disk that knows no locks.
const snapshotTemp = ".warmroute-tmp"

// snapshotStale is the age at which a temporary file was left behind by a crash.
const snapshotStale = time.Hour

// snapshotLock ends the name of the file that is locked for a snapshot, which itself
// is replaced with each write.
const snapshotLock = ".lock"

// lockRetryInterval is how often a process that took over tries to lock the snapshot.
const lockRetryInterval = 100 * time.Millisecond

// snapshotFile keeps the snapshot of the index on disk. After open nothing about
// it is fatal: without it the proxy only starts cold.
type snapshotFile struct {
	path  string
	index *snapshot.Store
	log   *slog.Logger

	mu   sync.Mutex // held while a snapshot is written; guards what follows
	lock *os.File   // nil: another process may write the snapshot
}

// open says why no snapshot can be written, and locks it for this process, unless
// a predecessor still writes it.
func (s *snapshotFile) open(hasPredecessor bool) error {
	if err := config.CheckSnapshot(s.path); err != nil || hasPredecessor {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acquireLock()
}

// acquireLock locks the snapshot, unless this process has locked it. s.mu is held.
func (s *snapshotFile) acquireLock() error {
	if s.lock != nil {
		return nil
	}
	file, err := os.OpenFile(s.path+snapshotLock, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := filelock.TryLock(file); err != nil {
		file.Close()
		if errors.Is(err, filelock.ErrLocked) {
			err = fmt.Errorf("another process writes %s; stop it, or choose another file for one of the two", s.path)
		}
		return err
	}
	s.lock = file
	return nil
}

// hasLock locks the snapshot if it can, and reports whether it is locked.
func (s *snapshotFile) hasLock() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acquireLock() == nil
}

// release leaves the snapshot to another process.
func (s *snapshotFile) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock != nil {
		s.lock.Close()
		s.lock = nil
	}
}

// load reads the snapshot of an earlier run, if there is one.
func (s *snapshotFile) load() {
	s.tidy()
	file, err := os.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = s.index.Read(file)
		file.Close()
	}
	if err != nil {
		s.log.Warn("no snapshot of the index is used", "file", s.path, "reason", err.Error())
	}
}

// tidy removes what a crash left in mid-write.
func (s *snapshotFile) tidy() {
	entries, _ := os.ReadDir(filepath.Dir(s.path)) // load tells of a folder that cannot be read
	for _, e := range entries {
		name := filepath.Join(filepath.Dir(s.path), e.Name())
		if !strings.HasPrefix(e.Name(), filepath.Base(s.path)+".") || !strings.HasSuffix(e.Name(), snapshotTemp) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > snapshotStale && config.CheckSnapshot(name) == nil {
			os.Remove(name)
		}
	}
}

// run saves a snapshot every minute until ctx is done.
func (s *snapshotFile) run(ctx context.Context) {
	ticks := time.NewTicker(snapshotEvery)
	defer ticks.Stop()
	locks := time.NewTicker(lockRetryInterval)
	defer locks.Stop()
	for {
		select {
		case <-locks.C:
			if s.hasLock() {
				locks.Stop()
			}
		case <-ticks.C:
			s.save()
		case <-ctx.Done():
			return
		}
	}
}

// save replaces the file by a new one, which is whole or not there.
func (s *snapshotFile) save() {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.acquireLock()
	if err == nil {
		err = s.write()
	}
	if err != nil {
		s.log.Warn("the index could not be saved", "file", s.path, "reason", err.Error())
	}
}

func (s *snapshotFile) write() error {
	if err := config.CheckSnapshot(s.path); err != nil {
		return err
	}
	// Readable by its owner alone: its hashes could confirm a guessed prompt.
	file, err := os.CreateTemp(filepath.Dir(s.path), filepath.Base(s.path)+".*"+snapshotTemp)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(file, 64<<10)
	err = s.index.Write(out)
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		err = file.Sync() // or a crash of the machine could leave a name without content
	}
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = os.Rename(file.Name(), s.path)
	}
	if err != nil {
		os.Remove(file.Name())
	}
	return err
}
