package main

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"warmroute/router"
)

// snapshotEvery bounds what a proxy that is killed outright forgets.
const snapshotEvery = time.Minute

// snapshotFile keeps the snapshot of the index on disk. Nothing about it is
// fatal: without it the proxy only starts cold.
type snapshotFile struct {
	path  string
	index *router.Snapshots
	log   *slog.Logger
}

// load reads the snapshot of an earlier run, if there is one.
func (s *snapshotFile) load() {
	file, err := os.Open(s.path)
	if err == nil {
		err = s.index.Read(file)
		file.Close()
	} else if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(filepath.Dir(s.path)) // better said now than at the first write
	}
	if err != nil {
		s.log.Warn("no snapshot of the index is used", "file", s.path, "reason", err.Error())
	}
}

// run saves a snapshot every minute until ctx is done.
func (s *snapshotFile) run(ctx context.Context) {
	ticks := time.NewTicker(snapshotEvery)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
			s.save()
		case <-ctx.Done():
			return
		}
	}
}

// save replaces the file by a new one, which is whole or not there.
func (s *snapshotFile) save() {
	if err := s.write(s.path + ".tmp"); err != nil {
		s.log.Warn("the index could not be saved", "file", s.path, "reason", err.Error())
	}
}

func (s *snapshotFile) write(temporary string) error {
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Its hashes could confirm a guessed prompt.
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
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
		err = os.Rename(temporary, s.path)
	}
	if err != nil {
		os.Remove(temporary)
	}
	return err
}
