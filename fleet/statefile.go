package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"

	"warmroute/atomicfile"
	"warmroute/filelock"
)

const (
	stateFileVersion  = 1
	maxStateFileBytes = 64 << 20
	// brokenSuffix ends the name that a state file gets which cannot be read.
	brokenSuffix = ".broken"
)

// stateFile is a Store in a file. It is used by one goroutine at a time.
type stateFile struct {
	path string
	log  *slog.Logger

	info    fs.FileInfo // of the file when it was read or written last; nil: there was none
	records map[string][]byte
}

func newStateFile(path string, log *slog.Logger) *stateFile {
	atomicfile.RemoveStaleTemps(path, nil)
	return &stateFile{path: path, log: log}
}

// storedState is the content of a state file.
type storedState struct {
	Version int                        `json:"version"`
	Records map[string]json.RawMessage `json:"records"`
}

// parseStateFile returns the records in the content of a state file.
func parseStateFile(content []byte) (map[string][]byte, error) {
	var s storedState
	if err := json.Unmarshal(content, &s); err != nil {
		return nil, err
	}
	if s.Version != stateFileVersion {
		return nil, fmt.Errorf("version %d is not %d", s.Version, stateFileVersion)
	}
	if len(s.Records) > maxRecords {
		return nil, fmt.Errorf("%d records are more than %d", len(s.Records), maxRecords)
	}
	records := map[string][]byte{}
	for key, data := range s.Records {
		records[key] = data
	}
	return records, nil
}

// ReadRecords implements Store. A file that cannot be parsed is set aside, so that the proxy serves without it.
func (s *stateFile) ReadRecords(context.Context) (map[string][]byte, error) {
	info, err := os.Stat(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		s.info, s.records = nil, nil
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if s.info != nil && os.SameFile(info, s.info) && info.ModTime().Equal(s.info.ModTime()) && info.Size() == s.info.Size() {
		return s.records, nil
	}
	content, err := readAtMost(s.path, maxStateFileBytes)
	if err != nil {
		return nil, err
	}
	records, err := parseStateFile(content)
	if err != nil {
		s.log.Error("state file is invalid: starting without it", "file", s.path, "kept_as", s.path+brokenSuffix, "err", err)
		return nil, os.Rename(s.path, s.path+brokenSuffix)
	}
	s.info, s.records = info, records
	return records, nil
}

func readAtMost(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return content, err
}

// WriteRecords implements Store. It blocks while another process writes.
func (s *stateFile) WriteRecords(ctx context.Context, changed map[string][]byte, removed []string) error {
	lock := filelock.NewLock(s.path) // after a binary upgrade two processes write it, for a while
	if err := lock.Acquire(ctx); err != nil {
		return err
	}
	defer lock.Unlock()
	records, err := s.ReadRecords(ctx) // another process may have written it meanwhile
	if err != nil {
		return err
	}
	records = maps.Clone(records)
	if records == nil {
		records = map[string][]byte{}
	}
	maps.Copy(records, changed)
	for _, key := range removed {
		delete(records, key)
	}
	state := storedState{Version: stateFileVersion, Records: map[string]json.RawMessage{}}
	for key, data := range records {
		state.Records[key] = data
	}
	err = atomicfile.Write(s.path, func(out io.Writer) error {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(&state)
	})
	s.info = nil // it is read again
	return err
}
