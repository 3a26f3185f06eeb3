package usage

import (
	"context"
	"log/slog"
	"time"

	"warmroute/filelock"
)

// saveInterval bounds what is lost if a proxy is killed.
const saveInterval = time.Minute

// Settings configure a Table.
type Settings struct {
	File string        `mapstructure:"file"`                // "": none
	Keep time.Duration `mapstructure:"keep" range:"0|1h.."` // age of rows that are removed from the file; 0: never
}

// NewInMemory returns a Table without a file.
func NewInMemory() *Table {
	return &Table{started: time.Now(), unsaved: rowSet{}, byKey: rowSet{}}
}

// New returns a Table with the file, if the settings have one. It fails if the file cannot be written or is locked by
// another process; in a binary upgrade, the file is locked later.
func New(s Settings, hasPredecessor bool) (*Table, error) {
	t := NewInMemory()
	if s.File == "" {
		return t, nil
	}
	var err error
	t.file, err = openFile(s.File, s.Keep, !hasPredecessor)
	return t, err
}

// SavePeriodically saves the rows every minute until ctx is done, and locks the file as soon as it can.
func (t *Table) SavePeriodically(ctx context.Context, log *slog.Logger) {
	filelock.SaveEvery(ctx, saveInterval, t.tryLockFile, func() { t.Save(log) })
}

// Save appends the rows that are not in the file to it. If that fails, they stay in memory. It does nothing
// without a file.
func (t *Table) Save(log *slog.Logger) {
	if t.file == nil {
		return
	}
	t.saving.Lock()
	defer t.saving.Unlock()
	now := time.Now()
	rows := t.takeUnsaved()
	var err error
	if len(rows) > 0 {
		err = t.file.append(rows, now)
	}
	switch before := t.setSaveResult(rows, err); {
	case err != nil && before == nil:
		log.Warn("failed to save usage", "file", t.file.path, "err", err)
	case err == nil && before != nil:
		log.Info("usage saved again", "file", t.file.path)
	}
	if err != nil || t.unlocked {
		return
	}
	if err := t.file.compactDaily(now); err != nil { // the rows are saved
		log.Warn("failed to compact usage", "file", t.file.path, "err", err)
	}
}

// tryLockFile locks the file, unless a predecessor still has it: until then both append to it. It reports whether
// nothing is left to lock.
func (t *Table) tryLockFile() (done bool) {
	if t.file == nil {
		return true
	}
	t.saving.Lock()
	defer t.saving.Unlock()
	return t.unlocked || t.file.lock.TryLock() == nil
}

// UnlockFile releases the lock of the file for a successor. Requests that end from then on are saved all the same.
func (t *Table) UnlockFile() {
	if t.file == nil {
		return
	}
	t.saving.Lock()
	defer t.saving.Unlock()
	t.unlocked = true
	t.file.lock.Unlock()
}
