package fleet

import (
	"context"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/backends/vllm"
)

// rankProbeTimeout bounds the request by which a server is asked how its ranks are counted.
const rankProbeTimeout = 5 * time.Second

// rankDecision says whether a server is one backend or one for each rank, and for which process and engines of the
// server that was decided.
type rankDecision struct {
	startTime float64 // of the replica's process
	labels    []int   // of its engines, in order
	numbers   []int   // value of vllm.RankHeader for each, which is a backend; nil: the server is one
}

// rankAction is what a poll of a server changes.
type rankAction int

const (
	keepRanks   rankAction = iota
	joinRanks              // the server becomes one backend, unless it is
	divideRanks            // each of its engines becomes a backend
	probeRanks             // likewise, if a probe tells the numbers of the engines
)

// nextRankAction returns what a poll of a server changes. rejectedAt is when the server refused a rank since the last
// change; zero: it did not.
func nextRankAction(l *backends.Load, off bool, last *rankDecision, rejectedAt time.Time) rankAction {
	labels, rejected := engineLabels(l), !rejectedAt.IsZero()
	known := last.startTime == l.StartTime && slices.Equal(last.labels, labels)
	switch {
	case off:
		return joinRanks
	case len(labels) < 2 && !l.QueuesKnown: // as while a server changes its engines
		return keepRanks
	case len(labels) < 2:
		return joinRanks
	case rejected && !l.PolledAt.After(rejectedAt): // the labels may be those of before
		return keepRanks
	case rejected && known: // they do not tell what has changed
		return joinRanks
	case known:
		return keepRanks
	case vllm.NeedsRankProbe(labels):
		return probeRanks
	}
	return divideRanks
}

func engineLabels(l *backends.Load) (labels []int) {
	for i := range l.PerEngine {
		labels = append(labels, l.PerEngine[i].Engine)
	}
	return labels
}

// UpdateRanks divides a server into one backend for each data-parallel engine that a poll shows, if it is known which
// value of vllm.RankHeader selects each of them. Otherwise the server is one backend. It blocks while it probes the
// server. Not safe for concurrent use for one server.
func (f *Fleet) UpdateRanks(ctx context.Context, server *backends.Backend, l *backends.Load) {
	m, last := f.rankDecisionOf(server)
	if m == nil {
		return
	}
	if server.Load() == nil { // polls were missed: it may be another process, which not all servers tell by their start time
		last = rankDecision{}
	}
	rejectedAt, _ := server.RanksRejectedAt()
	off := server.Options().RanksOff
	next := rankDecision{startTime: l.StartTime, labels: engineLabels(l)}
	switch action := nextRankAction(l, off, &last, rejectedAt); action {
	case keepRanks:
		return
	case joinRanks:
		if off { // so that it is decided again if that changes
			next = rankDecision{}
		}
	case divideRanks, probeRanks:
		var probe *vllm.RankError
		if action == probeRanks {
			ctx, cancel := context.WithTimeout(ctx, rankProbeTimeout)
			defer cancel()
			var err error
			if probe, err = server.ProbeRanks(ctx); err != nil {
				f.Log.Debug("ranks not probed", "backend", server.Name, "err", err)
				next = rankDecision{} // it is tried again after the next poll
				break
			}
		}
		next.numbers, _ = vllm.RankNumbers(next.labels, probe)
		if next.numbers == nil {
			f.Log.Warn("data-parallel ranks not used", "backend", server.Name, "reason", "the server does not report their numbers", "engines",
				next.labels)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applyRankDecision(m, next)
}

// rankDecisionOf returns the record of a server and what was decided for it last, or nil.
func (f *Fleet) rankDecisionOf(server *backends.Backend) (*managedBackend, rankDecision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := slices.IndexFunc(f.managed, func(m *managedBackend) bool { return m.backend == server }); i >= 0 {
		return f.managed[i], f.managed[i].ranks
	}
	return nil, rankDecision{}
}

// applyRankDecision makes d the decision of m, and replaces the backends by which its requests are routed if it needs
// others: requests in flight go on where they are. f.mu is held.
func (f *Fleet) applyRankDecision(m *managedBackend, d rankDecision) {
	server, former := m.backend, m.backend.Parts()
	parts := newParts(server, d)
	if conflict := f.findNameConflict(parts, former); conflict != "" {
		f.Log.Warn("data-parallel ranks not used", "backend", server.Name, "reason", "another backend has the name of one", "name", conflict)
		d.numbers = nil
		parts = newParts(server, d)
	}
	m.ranks = d
	if slices.Equal(parts, former) {
		if parts[0] != server {
			server.SetParts(parts) // their numbers may be others
		}
		return
	}
	for _, b := range parts {
		if !slices.Contains(former, b) {
			f.registry.Add(b)
			f.drainIfRecorded(b)
			f.Router.AddBackend(b)
		}
	}
	server.SetParts(parts)
	for _, b := range former {
		if !slices.Contains(parts, b) {
			f.replacePart(m, b)
		}
	}
	f.Log.Info("backend divided by data-parallel ranks", "backend", server.Name, "ranks", max(1, len(d.numbers)))
}

// newParts returns the backends for a decision. Those that the server has already are kept.
func newParts(server *backends.Backend, d rankDecision) (parts []*backends.Backend) {
	has := server.Parts()
	if d.numbers == nil {
		if _, isRank := has[0].Engine(); !isRank {
			return has
		}
		return []*backends.Backend{backends.NewUndivided(server)}
	}
	for i, label := range d.labels {
		at := slices.IndexFunc(has, func(b *backends.Backend) bool {
			engine, isRank := b.Engine()
			return isRank && engine == label
		})
		if at < 0 {
			parts = append(parts, backends.NewRank(server, label, d.numbers[i]))
			continue
		}
		has[at].SetRankNumber(d.numbers[i])
		parts = append(parts, has[at])
	}
	return parts
}

// findNameConflict returns a name in parts that another backend of the fleet has, apart from the former parts that are
// replaced; "": none.
func (f *Fleet) findNameConflict(parts, former []*backends.Backend) (name string) {
	for _, b := range f.registry.All() {
		isOther := func(p *backends.Backend) bool { return p != b && p.Name == b.Name }
		if !slices.Contains(former, b) && slices.ContainsFunc(parts, isOther) {
			return b.Name
		}
	}
	return ""
}

// replacePart removes a backend by which requests of m were routed. f.mu is held.
func (f *Fleet) replacePart(m *managedBackend, b *backends.Backend) {
	f.Router.RemoveBackend(b)
	f.registry.Remove(b)
	if b == m.backend { // it stays checked and polled
		return
	}
	b.Retire()
	m.formerParts = append(slices.DeleteFunc(m.formerParts, (*backends.Backend).Idle), b)
	if f.registry.Find(b.Name) == nil {
		f.Metrics.DeleteBackend(b.Name)
	}
	f.OnRemoved(b)
}
