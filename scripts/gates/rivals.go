package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"

	"warmroute/replay"
)

// rivals are figures of earlier runs. Without a path nothing is kept.
type rivals struct {
	path    string
	results map[string]replay.Summary // by rivalKey
}

// rivalKey names runs by all that they depend on but the trace and the program.
func rivalKey(row string, v variant, seeds int) string {
	s := v.scenario
	if traced, ok := s.Workload.(replay.Traced); ok {
		traced.Trace = nil // or the key would hold its address
		s.Workload = traced
	}
	hash := fnv.New64a()
	fmt.Fprintf(hash, "%+v", s)
	return fmt.Sprintf("%s/%s/%d/%016x", row, v.label, seeds, hash.Sum64())
}

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

func (r *rivals) find(row string, v variant, seeds int) (replay.Summary, bool) {
	s, ok := r.results[rivalKey(row, v, seeds)]
	return s, ok
}

// add keeps what the router's own rule had no part in.
func (r *rivals) add(row string, v variant, seeds int, s replay.Summary) {
	if r.path != "" && v.scenario.Policy != ours {
		r.results[rivalKey(row, v, seeds)] = s
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
