package router

import (
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/index"
)

// KVFollower learns from the KV events of a backend's replica what that has cached, and keeps the
// backend's part of the index accordingly. The package kvevents has it. NewSessionName, RecordEnd and Status
// are called while the router is locked, the others while it is not.
type KVFollower interface {
	// NewSessionName returns a name by which the events name the request that is sent with it.
	NewSessionName() string
	// RecordEnd records that a request that got a session has ended.
	RecordEnd(q KVRequest, now time.Time)
	// RestoreIndex restores what the events say, after the backend's part of the index was dropped.
	RestoreIndex()
	// RecordCacheReset records that the replica has emptied its cache, before its events say so. The
	// backend's part of the index was dropped.
	RecordCacheReset()
	// Status returns how many KV blocks the replica has reported that it holds, and whether it has
	// reported all of them.
	Status() (kvBlocks int, complete bool)
	// Close detaches the KVFollower from the backend.
	Close()
}

// KVRequest is what a KVFollower learns of a request that has ended.
type KVRequest struct {
	Session      string
	Blocks       []prompt.Block // of the prompt and of the response
	BlockBytes   int
	PromptBytes  int
	ReplyBytes   int
	PromptTokens int       // 0: not known
	OutputTokens int       // likewise, or the request was not completed
	StartedAt    time.Time // when the first output came; zero: there was none
}

// KVStatus is what a backend's replica has reported by KV events.
type KVStatus struct {
	KVBlocks  int  // that it holds
	Confirmed int  // blocks of prompts that it holds according to these
	Complete  bool // all that it holds is known
}

// SetKVFollower sets what follows the KV events of a backend; nil: nothing. It reports false, and does
// nothing, if the backend is not in the fleet.
func (r *Router) SetKVFollower(b *backends.Backend, f KVFollower) (known bool) {
	return r.UpdateIndex(b, func(*index.Index, time.Time) { r.fleet.states[b.Slot].follower = f })
}

// UpdateIndex calls update with the index while the router is locked. It reports false, and does
// nothing, if the backend is not in the fleet.
func (r *Router) UpdateIndex(b *backends.Backend, update func(x *index.Index, now time.Time)) (known bool) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.fleet.has(b) {
		return false
	}
	update(r.fleet.index, r.now())
	return true
}

// kvFollower returns what follows the KV events of a backend, nil if nothing does.
func (r *Router) kvFollower(b *backends.Backend) (f KVFollower) {
	r.UpdateIndex(b, func(*index.Index, time.Time) { f = r.fleet.states[b.Slot].follower })
	return f
}

// restoreIndex lets KV events say what a backend holds, after its part of the index was dropped. f is
// nil if nothing follows them.
func restoreIndex(f KVFollower) {
	if f != nil {
		f.RestoreIndex()
	}
}

// startKVRequest gives a request a session by which the KV events of its backend name it.
func (f *fleet) startKVRequest(d *Reservation, req *Request) {
	follower := f.states[d.Backend.Slot].follower
	if follower == nil || req.NoEngine || req.Stored || req.Media || req.Sequences > 1 || len(req.Blocks) == 0 {
		return
	}
	d.KVSession = follower.NewSessionName()
	d.kv = KVRequest{Session: d.KVSession, Blocks: req.Blocks, BlockBytes: f.blockBytes, PromptBytes: req.Bytes}
}

// recordStart records the first output. The blocks may be another request's from now on.
func (q *KVRequest) recordStart(now time.Time) {
	q.Blocks, q.StartedAt = slices.Clone(q.Blocks), now
}

// endKVRequest tells what follows the KV events of a request's backend that the request has ended.
func (f *fleet) endKVRequest(d *Reservation, o *Outcome, now time.Time) {
	q := d.kv
	d.kv = KVRequest{}
	follower := f.states[d.Backend.Slot].follower
	if follower == nil || q.Session == "" || o.End == NotProcessed {
		return
	}
	if q.StartedAt.IsZero() {
		q.Blocks = slices.Clone(q.Blocks)
	}
	q.PromptTokens = o.PromptTokens
	if o.End == Completed {
		q.OutputTokens = o.OutputTokens
		if len(o.Reply) > 0 && o.OutputTokens > 0 {
			q.Blocks = append(q.Blocks, o.Reply...)
			q.ReplyBytes = len(q.Blocks)*f.blockBytes + o.ReplyTailBytes - q.PromptBytes
		}
	}
	follower.RecordEnd(q, now)
}

// findLinked returns the longest prefix of a matched request that a backend holds and that is linked
// to KV blocks, so that its number of tokens is known.
func (f *fleet) findLinked(req *Request, matched []int) decide.LinkedPrefix {
	if !slices.ContainsFunc(f.states, func(s backendState) bool { return s.follower != nil }) {
		return decide.LinkedPrefix{}
	}
	most := 0
	for _, b := range req.Backends {
		if b.Slot < len(matched) {
			most = max(most, matched[b.Slot])
		}
	}
	l := f.index.LinkedPrefix(req.Blocks[:most], nil)
	return decide.LinkedPrefix{Blocks: l.Blocks, Bytes: l.Blocks * f.blockBytes, Tokens: float64(l.Tokens), KVTokens: float64(l.KVTokens)}
}

// kvLinks are the links of an index.
type kvLinks struct{ index *index.Index }

// KVTokens implements decide.Links.
func (l kvLinks) KVTokens(b prompt.Block) (tokens int, known bool) {
	link, known := l.index.Link(b)
	return link.KVTokens, known
}
