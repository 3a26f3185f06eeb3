package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"warmroute/router"
)

// snapshotEvery bounds what a proxy that is killed outright forgets.
const snapshotEvery = time.Minute

// snapshotTemp ends the names of files that are being written; what comes
// before it differs, so that two proxies with one snapshot do not meet.
const snapshotTemp = ".warmroute-tmp"

// snapshotStale is the age at which a temporary file was left behind by a crash.
const snapshotStale = time.Hour

// snapshotFile keeps the snapshot of the index on disk. Nothing about it is
// fatal: without it the proxy only starts cold.
type snapshotFile struct {
	path  string
	index *router.Snapshots
	log   *slog.Logger
	off   bool // what has the name is not ours: nothing is written

	saving sync.Mutex // one at a time
}

// load reads the snapshot of an earlier run, if there is one.
func (s *snapshotFile) load() {
	if err := replaceable(s.path); err != nil {
		s.off = true
		s.log.Warn("no snapshot of the index is used or written", "file", s.path, "reason", err.Error()+"; give index.snapshot another file")
		return
	}
	s.tidy()
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

// replaceable says why a file may not be written over, or nil: it is ours,
// holds nothing, or is not there.
func replaceable(path string) error {
	if err := plainFile(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	head := make([]byte, 64)
	n, err := io.ReadFull(file, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	if !router.BeginsSnapshot(head[:n]) {
		return errors.New("it is no snapshot of warmroute's")
	}
	return nil
}

// tidy removes what a crash left in mid-write.
func (s *snapshotFile) tidy() {
	entries, _ := os.ReadDir(filepath.Dir(s.path)) // load tells of a folder that cannot be read
	for _, e := range entries {
		name := filepath.Join(filepath.Dir(s.path), e.Name())
		if !strings.HasPrefix(e.Name(), filepath.Base(s.path)+".") || !strings.HasSuffix(e.Name(), snapshotTemp) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > snapshotStale && replaceable(name) == nil {
			os.Remove(name)
		}
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
	if s.off {
		return
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	if err := s.write(); err != nil {
		s.log.Warn("the index could not be saved", "file", s.path, "reason", err.Error())
	}
}

func (s *snapshotFile) write() error {
	if err := replaceable(s.path); err != nil {
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
