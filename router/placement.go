package router

import (
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/queue"
)

// Placement is a request that a router has sent to a backend, as far as its peers, the routers of
// other proxies in front of the same replicas, have to know it.
type Placement struct {
	ID      uint64 // unique among those of one router
	Backend *backends.Backend

	Model, Adapter string
	Blocks         []prompt.Block // of the prompt; none if it is too long for the backend
	Forks          []prompt.Fork
	Bytes          int     // of canonical prompt, all sequences included
	PromptTokens   float64 // about
	UncachedTokens float64 // that the backend has to compute, about
	Sequences      int64
	MaxOutput      int // tokens; 0: not known
	Class          queue.Class
	TextClass      prompt.TextClass

	Turn      prompt.Turn
	PromptKey uint64 // of its Request
	Session   uint64 // likewise

	Retry, Streams, NonGenerative, IsText, TooLong bool

	Prefilled bool // its prefill is over; of a placement in flight that is reported again
}

// PlacementEnd is the end of a Placement, with what routers learn from it.
type PlacementEnd struct {
	Outcome
	TTFT        time.Duration // 0: not measured
	QueuedAhead float64       // uncached tokens sent to the backend before it, and not yet computed
}

// PlacementEventKind is what happened to a Placement.
type PlacementEventKind uint8

// The events of a Placement, in their order. The second one may be missing.
const (
	PlacementSent PlacementEventKind = iota + 1
	PlacementPrefilled
	PlacementEnded
	PlacementIndexed // by IndexPlacement: it has a Backend and Blocks, no ID and no other event
)

// PlacementEvent is a change of a router's account.
type PlacementEvent struct {
	Kind      PlacementEventKind
	Placement // of PlacementSent and PlacementIndexed; of the other events the ID alone
	End       PlacementEnd
}

// PlacementReporter is told what a router sends to its backends. ReportPlacement is called under
// the router's lock: it must not block, nor call the router. It retains nothing of the event.
type PlacementReporter interface {
	ReportPlacement(e *PlacementEvent)
}

// reportSent reports a request that was just reserved.
func (r *Router) reportSent(d *Decision, req *Request) {
	p := &r.peers
	if p.reporter == nil {
		return
	}
	p.lastID++
	d.request.id = p.lastID
	blocks := req.Blocks
	if d.prediction.IsTooLong {
		blocks = nil
	}
	p.event = PlacementEvent{Kind: PlacementSent, Placement: Placement{
		ID: p.lastID, Backend: d.Backend, Model: req.Model, Adapter: req.Adapter, Blocks: blocks, Forks: req.Forks, Bytes: req.Bytes,
		PromptTokens: d.prediction.PromptTokens, UncachedTokens: d.prediction.Uncached, Sequences: d.prediction.Sequences,
		MaxOutput: req.MaxOutputTokens, Class: d.request.class, TextClass: req.TextClass,
		Turn: req.Turn, PromptKey: req.PromptKey, Session: req.Session,
		Retry: r.decision.request.Retry, Streams: req.Streams, NonGenerative: req.NonGenerative,
		IsText: d.prediction.IsText, TooLong: d.prediction.IsTooLong,
	}}
	p.reporter.ReportPlacement(&p.event)
}

// reportPrefilled reports that the prefill of a request is over.
func (r *Router) reportPrefilled(d *Decision) {
	p := &r.peers
	if p.reporter == nil || d.request.id == 0 {
		return
	}
	p.event = PlacementEvent{Kind: PlacementPrefilled, Placement: Placement{ID: d.request.id}}
	p.reporter.ReportPlacement(&p.event)
}

// reportEnded reports the end of a request.
func (r *Router) reportEnded(d *Decision, o *Outcome) {
	p := &r.peers
	if p.reporter == nil || d.request.id == 0 {
		return
	}
	p.event = PlacementEvent{Kind: PlacementEnded, Placement: Placement{ID: d.request.id}, End: PlacementEnd{
		Outcome: *o, TTFT: d.prediction.TTFT, QueuedAhead: d.prediction.QueuedAhead,
	}}
	p.reporter.ReportPlacement(&p.event)
}

// reportIndexed reports a prompt that was indexed for a backend without a request of ours.
func (r *Router) reportIndexed(b *backends.Backend, blocks []prompt.Block) {
	p := &r.peers
	if p.reporter == nil {
		return
	}
	p.event = PlacementEvent{Kind: PlacementIndexed, Placement: Placement{Backend: b, Blocks: blocks}}
	p.reporter.ReportPlacement(&p.event)
}
