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
	results map[string]replay.Summary // by key
	traces  map[*replay.Trace]uint64  // hashes of those seen so far
}

// key names runs by all that they depend on but the program.
func (r *rivals) key(row string, v variant, seeds int) string {
	s := v.scenario
	var trace uint64
	if traced, ok := s.Workload.(replay.Traced); ok {
		trace = r.traceHash(traced.Trace)
		traced.Trace = nil // or the key would hold its address
		s.Workload = traced
	}
	hash := fnv.New64a()
	fmt.Fprintf(hash, "%+v %x", s, trace)
	return fmt.Sprintf("%s/%s/%d/%016x", row, v.label, seeds, hash.Sum64())
}

// traceHash takes a while for a long trace, and many rows play the same one.
func (r *rivals) traceHash(t *replay.Trace) uint64 {
	sum, ok := r.traces[t]
	if !ok {
		hash := fnv.New64a()
		_ = json.NewEncoder(hash).Encode(t) // numbers into a hash: neither fails
		sum = hash.Sum64()
		r.traces[t] = sum
	}
	return sum
}

func openRivals(path string) (*rivals, error) {
	r := &rivals{path: path, results: make(map[string]replay.Summary), traces: make(map[*replay.Trace]uint64)}
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
	s, ok := r.results[r.key(row, v, seeds)]
	return s, ok
}

// add keeps what the router's own rule had no part in.
func (r *rivals) add(row string, v variant, seeds int, s replay.Summary) {
	if r.path != "" && v.scenario.Policy != ours {
		r.results[r.key(row, v, seeds)] = s
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
