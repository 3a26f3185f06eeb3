// Package snapshot carries what a router knows of its backends' caches, what it has
// learned of them, and which stored responses they hold, over a restart of the proxy.
package snapshot

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/router/index"
	"warmroute/router/responseindex"
)

// Store reads and writes snapshots of a router. A replica that runs on while the
// proxy restarts still holds its blocks. Safe for concurrent use.
//
// What was read is given to a backend at its first poll, unless that shows that the replica's cache is another
// one by now. A replica without /metrics shows nothing and starts cold.
type Store struct {
	router      *router.Router
	options     Options
	fingerprint uint64

	mu        sync.Mutex // guards what follows, not what the pointers point to
	lastLoads map[*backends.Backend]*backends.Load
	pending   map[string]*part // read, until the first poll, by address; ranks are known by that poll only
	keptBytes int              // of memory, by pending
}

// Options configure a Store.
type Options struct {
	BlockBytes int                  // of canonical prompt in a block
	MaxBytes   int64                // of a snapshot, without the responses: what the router's index may take
	Responses  *responseindex.Index // written and read too; nil: there is none
	Now        func() time.Time
	Log        *slog.Logger
}

// NewStore returns the Store of a router.
func NewStore(r *router.Router, o Options) *Store {
	return &Store{
		router:      r,
		options:     o,
		fingerprint: HashingFingerprint(o.BlockBytes),
		lastLoads:   map[*backends.Backend]*backends.Load{},
		pending:     map[string]*part{},
	}
}

// ReadPending reads a snapshot that Write wrote. It is used at each backend's first poll; the responses are
// there at once, even if the hashes of its prompts are of no use. On an error, which says why, nothing else has
// changed. Call it before the first ObserveLoad.
func (s *Store) ReadPending(from io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(from, s.options.MaxBytes+responseindex.MaxEncodedBytes+1))
	if err != nil {
		return err
	}
	f, err := parseFrame(data)
	if err == nil && int64(len(data)-len(f.responses)) > s.options.MaxBytes {
		err = errors.New("snapshot is larger than index.max_bytes")
	}
	if err == nil && s.options.Responses != nil && len(f.responses) > 0 {
		err = s.options.Responses.Restore(f.responses)
	}
	if err != nil {
		return err
	}
	parts, err := f.parseParts(s.fingerprint, s.options.Now())
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	servers := map[string]bool{}
	for _, b := range s.router.Backends() {
		servers[b.Server().Address()] = true
	}
	for address, p := range parts {
		if server, _, _ := strings.Cut(address, "#"); servers[server] {
			s.pending[address] = p
		}
	}
	s.keptBytes = len(data)
	s.compactPending()
	return nil
}

// compactPending copies the pending parts when they are the smaller half of what they
// keep in memory: a whole file for a backend that never comes back would be too much,
// and all of it twice at the start as well. s.mu is held.
func (s *Store) compactPending() {
	size := 0
	for _, p := range s.pending {
		size += len(p.raw)
	}
	if size > s.keptBytes/2 {
		return
	}
	s.keptBytes = size
	for address, p := range s.pending {
		s.pending[address] = p.clone()
	}
}

// ObserveLoad calls Router.ObserveLoad, and at the first poll of a backend restores
// what was read of it. Calls for one backend do not overlap.
func (s *Store) ObserveLoad(b *backends.Backend, l *backends.Load) {
	s.router.ObserveLoad(b, l)
	p := s.recordLoad(b, l)
	if p == nil {
		return
	}
	age := s.options.Now().Sub(p.takenAt).Round(time.Second)
	if reason := p.mismatchReason(l); reason != "" {
		s.options.Log.Warn("index snapshot not used", "backend", b.Name, "reason", reason, "age", age)
	} else {
		s.options.Log.Info("index restored", "backend", b.Name, "blocks", s.router.Import(b, p.estimates, p.decodeBlocks()), "age", age)
	}
	s.removePending(b) // not before: a Write meanwhile has the whole of it
}

// recordLoad records a poll and returns what was read of the backend, nil if nothing.
func (s *Store) recordLoad(b *backends.Backend, l *backends.Load) (pending *part) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastLoads[b] = l
	return s.pending[b.Address()]
}

func (s *Store) removePending(b *backends.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, b.Address())
	s.compactPending()
}

// ForgetBackend forgets a backend that was removed, and what was read of its ranks; no ObserveLoad follows.
func (s *Store) ForgetBackend(b *backends.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := b.Address()
	maps.DeleteFunc(s.pending, func(address string, _ *part) bool { return address == own || strings.HasPrefix(address, own+"#") })
	delete(s.lastLoads, b)
	s.compactPending()
}

// Write writes what is known of every backend that was polled since the start, and
// of the others what was read. The router continues to decide meanwhile.
func (s *Store) Write(to io.Writer) error {
	list := s.router.Backends()
	s.mu.Lock()
	pending, loads := maps.Clone(s.pending), maps.Clone(s.lastLoads)
	s.mu.Unlock()
	// Of a backend never polled nothing could show, one day, that its cache is still the same.
	list = slices.DeleteFunc(list, func(b *backends.Backend) bool { return pending[b.Address()] != nil || loads[b] == nil })
	var responses []byte
	if s.options.Responses != nil {
		responses = s.options.Responses.AppendTo(nil)
	}
	w := startSnapshot(to, s.fingerprint, len(list)+len(pending), responses)
	for _, p := range pending {
		w.writePart(p.raw)
	}
	var blocks []index.ExportedBlock
	var buf []byte
	for _, b := range list {
		p := part{address: b.Address(), takenAt: s.options.Now(), load: *loads[b]}
		p.estimates, blocks = s.router.Export(b, nil, blocks[:0])
		buf = p.appendTo(buf[:0], blocks)
		w.writePart(buf)
	}
	if err := w.writeChecksum(); err != nil {
		return fmt.Errorf("write index snapshot: %w", err)
	}
	return nil
}
