package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"warmroute/replay"
)

// rivals are figures of earlier runs. Without a path nothing is kept.
type rivals struct {
	path    string
	results map[string]replay.Summary // by rivalKey
}

func rivalKey(row, label string, seeds int) string { return fmt.Sprintf("%s/%s/%d", row, label, seeds) }

func openRivals(path string) (*rivals, error) {
	r := &rivals{path: path, results: make(map[string]replay.Summary)}
	if path == "" {
		return r, nil
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &r.results); err != nil {
		return nil, fmt.Errorf("%s: %w; remove it", path, err)
	}
	return r, nil
}

func (r *rivals) find(row, label string, seeds int) (replay.Summary, bool) {
	s, ok := r.results[rivalKey(row, label, seeds)]
	return s, ok
}

func (r *rivals) add(row string, seeds int, s replay.Summary) {
	if r.path != "" {
		r.results[rivalKey(row, s.Policy, seeds)] = s
	}
}

func (r *rivals) save() error {
	if r.path == "" {
		return nil
	}
	b, err := json.Marshal(r.results)
	if err != nil {
		return err
	}
	return os.WriteFile(r.path, b, 0o666)
}
