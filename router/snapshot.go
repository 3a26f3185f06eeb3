package router

import (
	"errors"
	"io"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/router/index"
)

// snapshotPart is how many blocks are copied out or in while the Router waits:
// some ten microseconds' worth, as long as a decision.
const snapshotPart = 512

// Snapshots carries what a Router knows of its backends' caches, and what it has
// learned of them, over a restart of the proxy: a replica that went on running
// still holds its blocks, and a fleet must not become cold because its proxy was
// updated. Safe for concurrent use.
//
// What was read is given to a backend at its first scrape, if that does not
// show that the replica's cache is another one by now. A replica without
// /metrics shows nothing and starts cold.
type Snapshots struct {
	router   *Router
	log      *slog.Logger
	maxBytes int64

	mu    sync.Mutex // guards what follows, not what the pointers point to
	known map[*backends.Backend]*backends.Load
	read  map[*backends.Backend]*part // waits for the first scrape
	kept  int                         // bytes that stay in memory for read
}

// NewSnapshots makes the Snapshots of a Router and its backends, none of them
// larger than maxBytes, which is what the Router's index may take.
func NewSnapshots(r *Router, maxBytes int64, log *slog.Logger) *Snapshots {
	return &Snapshots{
		router:   r,
		log:      log,
		maxBytes: maxBytes,
		known:    map[*backends.Backend]*backends.Load{},
		read:     map[*backends.Backend]*part{},
	}
}

// Read takes in what Write wrote. On an error, which says why the snapshot is of
// no use, nothing has changed. Call it before the first Observe.
func (s *Snapshots) Read(from io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(from, s.maxBytes+1))
	if err != nil {
		return err
	}
	if int64(len(data)) > s.maxBytes {
		return errors.New("it is larger than index.max_bytes")
	}
	parts, err := parseSnapshot(data, fingerprint(s.router.blockBytes), s.router.now())
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.router.present() {
		if p := parts[backends.Address(b.URL)]; p != nil {
			s.read[b] = p
		}
	}
	s.kept = len(data)
	s.trim()
	return nil
}

// trim copies the parts that still wait when they are the smaller half of what
// they keep in memory: all of a file for a backend that never comes back would
// be too much, and all of it twice at the start as well. s.mu is held.
func (s *Snapshots) trim() {
	waiting := 0
	for _, p := range s.read {
		waiting += len(p.raw)
	}
	if waiting > s.kept/2 {
		return
	}
	s.kept = waiting
	for b, p := range s.read {
		s.read[b] = p.clone()
	}
}

// ObserveLoad is Router.ObserveLoad, and gives b what was read of it at its first call.
// Calls for one backend come one after the other.
func (s *Snapshots) ObserveLoad(b *backends.Backend, l *backends.Load) {
	s.router.ObserveLoad(b, l)
	s.mu.Lock()
	p := s.read[b]
	s.known[b] = l
	s.mu.Unlock()
	if p == nil {
		return
	}
	age := s.router.now().Sub(p.taken).Round(time.Second)
	if why := p.contradicted(l); why != "" {
		s.log.Warn("snapshot of the index not used", "backend", b.Name, "reason", why, "age", age)
	} else {
		s.log.Info("index restored", "backend", b.Name, "blocks", s.restore(b, p), "age", age)
	}
	s.mu.Lock()
	delete(s.read, b) // until now: a Write meanwhile has the whole of it
	s.trim()
	s.mu.Unlock()
}

// restore returns how many blocks were taken in.
func (s *Snapshots) restore(b *backends.Backend, p *part) int {
	r, all := s.router, p.blocks()
	r.deciding.Lock()
	if !r.has(b) {
		r.deciding.Unlock()
		return 0
	}
	if r.lessons[b.Slot].recall(p.lessons) {
		r.learnRate()
		r.resize(b.Slot)
	}
	i := r.index.Import(b.Slot, len(all))
	r.deciding.Unlock()
	total := 0
	for len(all) > 0 {
		n := min(snapshotPart, len(all))
		r.deciding.Lock()
		taken, more := i.Add(all[:n])
		r.deciding.Unlock()
		total += taken
		if !more {
			break
		}
		all = all[n:]
		runtime.Gosched() // or this goroutine would have the lock again before who waits for it
	}
	return total
}

// Write writes what is known of every backend that was scraped since the start,
// and for the others what was read. The Router goes on deciding meanwhile.
func (s *Snapshots) Write(to io.Writer) error {
	list := s.router.present()
	s.mu.Lock()
	read, known := maps.Clone(s.read), maps.Clone(s.known)
	s.mu.Unlock()
	// A backend never scraped has nothing that could show, one day, that its cache is still the same.
	list = slices.DeleteFunc(list, func(b *backends.Backend) bool { return read[b] == nil && known[b] == nil })
	w := newSnapshotWriter(to, fingerprint(s.router.blockBytes), len(list))
	var copied []index.ExportedBlock
	var buf []byte
	for _, b := range list {
		if p := read[b]; p != nil {
			w.part(p.raw)
			continue
		}
		p := part{address: backends.Address(b.URL), taken: s.router.now(), load: *known[b]}
		var learned lessons
		learned, copied = s.export(b, copied[:0])
		buf = p.encode(buf[:0], &learned, copied)
		w.part(buf)
	}
	return w.end()
}

// ForgetBackend is for a backend that has left, of which no Observe comes any more.
func (s *Snapshots) ForgetBackend(b *backends.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.read, b)
	delete(s.known, b)
	s.trim()
}

// export copies what was learned of b, and to all what the index holds of it, in
// parts. Of a backend that leaves meanwhile there is nothing left to be copied.
func (s *Snapshots) export(b *backends.Backend, all []index.ExportedBlock) (lessons, []index.ExportedBlock) {
	r := s.router
	r.deciding.Lock()
	if !r.has(b) {
		r.deciding.Unlock()
		return newLessons(), all
	}
	learned := r.lessons[b.Slot]
	e := r.index.Export(b.Slot)
	r.deciding.Unlock()
	for more := true; more; runtime.Gosched() {
		r.deciding.Lock()
		if r.has(b) {
			all, more = e.Next(all, snapshotPart)
		} else {
			all, more = all[:0], false // its slot may be another's
		}
		r.deciding.Unlock()
	}
	return learned, all
}
