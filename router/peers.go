package router

import (
	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/ledger"
)

// peers is what peers have in flight, and what they are told.
type peers struct {
	ledger.Peers
	reporter PlacementReporter // nil: there are none
	lastID   uint64            // of our own placements
	event    PlacementEvent    // scratch of the reports
}

// peerRecorder returns what is recorded of the requests of peers.
func (r *Router) peerRecorder() ledger.Recorder {
	sent := func(e *ledger.Entry, p *Placement, bytesPerToken float64) {
		r.fleet.recordPeerRequestInPolicy(e, p, bytesPerToken)
		r.admission.queue.RecordPrompt(e.Conversation, p.Blocks, e.SentAt)
	}
	return ledger.Recorder{Sent: sent, Tracker: r.fleet.nextTurnTracker()}
}

// reportSent reports a request that was just chosen a backend for.
func (p *peers) reportSent(d *Reservation, req *Request, isRetry bool) {
	if p.reporter == nil {
		return
	}
	p.lastID++
	d.peerID = p.lastID
	blocks, prediction := req.Blocks, &d.entry.Prediction
	if prediction.IsTooLong {
		blocks = nil
	}
	p.event = PlacementEvent{Kind: PlacementSent, Placement: Placement{
		ID: p.lastID, Backend: d.Backend, Model: req.Model, Adapter: req.Adapter, Blocks: blocks, Forks: req.Forks, Bytes: req.Bytes,
		PromptTokens: prediction.PromptTokens, UncachedTokens: prediction.Uncached, Sequences: prediction.Sequences,
		MaxOutput: req.MaxOutputTokens, Class: d.entry.Class, TextClass: req.TextClass,
		Turn: req.Turn, PromptKey: req.PromptKey, Conversation: req.Conversation, Tenant: req.Tenant, RequestKind: d.entry.RequestKind,
		Retry: isRetry, Streams: req.Streams, NonGenerative: req.NonGenerative,
		IsText: prediction.IsText, TooLong: prediction.IsTooLong,
	}}
	p.reporter.ReportPlacement(&p.event)
}

// reportPrefilled reports that the prefill of a request is over.
func (p *peers) reportPrefilled(d *Reservation) {
	if p.reporter == nil || d.peerID == 0 {
		return
	}
	p.event = PlacementEvent{Kind: PlacementPrefilled, Placement: Placement{ID: d.peerID}}
	p.reporter.ReportPlacement(&p.event)
}

// reportEnded reports the end of a request.
func (p *peers) reportEnded(d *Reservation, o *Outcome) {
	if p.reporter == nil || d.peerID == 0 {
		return
	}
	p.event = PlacementEvent{Kind: PlacementEnded, Placement: Placement{ID: d.peerID}, End: PlacementEnd{
		Outcome: *o, TTFT: d.entry.Prediction.TTFT, QueuedAhead: d.entry.Prediction.QueuedAhead,
	}}
	p.reporter.ReportPlacement(&p.event)
}

// reportIndexed reports a prompt that was indexed for a backend without a request of ours.
func (p *peers) reportIndexed(b *backends.Backend, blocks []prompt.Block) {
	if p.reporter == nil {
		return
	}
	p.event = PlacementEvent{Kind: PlacementIndexed, Placement: Placement{Backend: b, Blocks: blocks}}
	p.reporter.ReportPlacement(&p.event)
}
