package server

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"warmroute/atomicfile"
	"warmroute/config"
	"warmroute/filelock"
	"warmroute/proxy/recorder"
	"warmroute/recovery"
	"warmroute/router"
	"warmroute/router/responseindex"
	"warmroute/router/snapshot"
)

// snapshotInterval bounds what a proxy that is killed forgets.
const snapshotInterval = time.Minute

// stateFiles are the files that outlive the process: the snapshot of the index and the
// recording of requests, which may also be in memory only.
type stateFiles struct {
	snapshot *snapshotFile      // nil: none
	recorder *recorder.Recorder // nil: requests are not recorded

	stop    context.CancelFunc
	writing sync.WaitGroup
	left    bool // another process writes the files
}

// loadSnapshotAndStartWriters reads the snapshot of an earlier run, then writes snapshots and the recording
// until stopAndSave, stopWithoutSaving, or the end of ctx.
func (f *stateFiles) loadSnapshotAndStartWriters(ctx context.Context, panics recovery.Reporter) {
	ctx, f.stop = context.WithCancel(ctx)
	if f.recorder != nil {
		f.writing.Go(func() { panics.RunLoop(ctx, recovery.Recording, f.recorder.Run) })
	}
	if f.snapshot != nil {
		f.snapshot.load()
		f.writing.Go(func() { panics.RunLoop(ctx, recovery.Snapshot, f.snapshot.savePeriodically) })
	}
}

// stopWithoutSaving stops writing, waits for that, and leaves the files to another process.
func (f *stateFiles) stopWithoutSaving() {
	f.stop()
	f.writing.Wait()
	f.left = true
	if f.snapshot != nil {
		f.snapshot.releaseLock()
	}
}

// stopAndSave stops writing, saves a last snapshot and unlocks it, unless the files are another process's.
func (f *stateFiles) stopAndSave() {
	f.stop()
	f.writing.Wait()
	if f.snapshot != nil && !f.left {
		f.snapshot.save()
		f.snapshot.releaseLock()
	}
}

// snapshotFile keeps the snapshot of the index and the stored responses on disk. Once it is open no error of it
// is fatal: without it the proxy only starts cold.
type snapshotFile struct {
	path  string
	index *snapshot.Store
	log   *slog.Logger

	mu   sync.Mutex // held while a snapshot is written; guards what follows
	lock filelock.Lock
}

// newSnapshotStore returns what reads and writes snapshots; nil if there are none.
func newSnapshotStore(c *config.Config, r *router.Router, responses *responseindex.Index, log *slog.Logger) *snapshot.Store {
	if c.Index.Snapshot == "" && c.Redis.URL == "" {
		return nil
	}
	return snapshot.NewStore(r, snapshot.Options{BlockBytes: c.Index.BlockBytes, MaxBytes: c.Index.MaxBytes, Responses: responses,
		Now: time.Now, Log: log})
}

// newSnapshotFile returns the snapshot, with lockNow locked for this process; else a predecessor still writes
// it, and savePeriodically locks it. It fails if the snapshot cannot be written. It reads nothing of it.
func newSnapshotFile(path string, store *snapshot.Store, log *slog.Logger, lockNow bool) (*snapshotFile, error) {
	s := &snapshotFile{
		path:  path,
		index: store,
		log:   log,
		lock:  filelock.NewLock(path),
	}
	if err := snapshot.CheckReplaceable(s.path); err != nil || !lockNow {
		return s, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s, s.lock.TryLock()
}

func (s *snapshotFile) retryLock() (locked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lock.TryLock() == nil
}

// releaseLock unlocks the snapshot: it is left to another process.
func (s *snapshotFile) releaseLock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lock.Unlock()
}

func (s *snapshotFile) load() {
	atomicfile.RemoveStaleTemps(s.path, func(file string) bool { return snapshot.CheckReplaceable(file) == nil })
	file, err := os.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = s.index.ReadPending(file)
		file.Close()
	}
	if err != nil {
		s.log.Warn("index snapshot not loaded", "file", s.path, "err", err)
	}
}

// savePeriodically saves a snapshot every minute until ctx is done, and locks it as soon as it can.
func (s *snapshotFile) savePeriodically(ctx context.Context) {
	filelock.SaveEvery(ctx, snapshotInterval, s.retryLock, s.save)
}

// save replaces the file by a new one, atomically.
func (s *snapshotFile) save() {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.lock.TryLock()
	if err == nil {
		err = s.write()
	}
	if err != nil {
		s.log.Warn("failed to save index snapshot", "file", s.path, "err", err)
	}
}

func (s *snapshotFile) write() error {
	if err := snapshot.CheckReplaceable(s.path); err != nil {
		return err
	}
	// Readable by its owner alone: its hashes could confirm a guessed prompt.
	return atomicfile.Write(s.path, s.index.Write)
}
