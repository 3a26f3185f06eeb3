package replay

import (
	"errors"
	"fmt"
	"math"
	"time"

	"warmroute/backends"
	"warmroute/lab/sim/engine"
	"warmroute/router"
	"warmroute/router/decide"
)

// Split is which requests of a fleet with roles are split.
type Split string

const (
	SplitByCost Split = "cost" // those for which the router decides so; also ""
	SplitAlways Split = "always"
	SplitNever  Split = "never"
)

// kvLease is how long a replica keeps a prompt's KV cache for another one. Those that wait in the other one's
// engine renew it.
const kvLease = 30 * time.Second

func (s *Scenario) hasRoles() bool { return s.Prefills+s.Decodes > 0 }

// role returns the role of a replica: the first ones are for prefill, those after them for decode.
func (s *Scenario) role(backend int) backends.Role {
	switch {
	case backend < s.Prefills:
		return backends.RolePrefill
	case backend < s.Prefills+s.Decodes:
		return backends.RoleDecode
	}
	return backends.RoleBoth
}

func (s *Scenario) validateRoles() error {
	switch {
	case s.Prefills < 0 || s.Decodes < 0 || s.Prefills+s.Decodes > s.Backends:
		return fmt.Errorf("%d replicas for prefill and %d for decode among %d", s.Prefills, s.Decodes, s.Backends)
	case s.hasRoles() && s.Policy == Pooled:
		return fmt.Errorf("policy %s knows no roles", Pooled)
	case s.hasRoles() && s.Engine.Groups.IsHybrid():
		return errors.New("replicas of a hybrid model cannot transfer KV here: give them no roles")
	}
	switch s.Split {
	case "", SplitByCost, SplitAlways, SplitNever:
		return nil
	}
	return fmt.Errorf("unknown split %q: use %s, %s or %s", s.Split, SplitByCost, SplitAlways, SplitNever)
}

// disaggregationSettings returns those of the router.
func (s *Scenario) disaggregationSettings() router.DisaggregationSettings {
	h := router.DisaggregationSettings{Lease: kvLease}
	if s.Split == SplitAlways {
		h.MinUncachedTokens = 1
	}
	return h
}

// prefillDone is where the KV cache of a prompt is that was computed for another replica to read.
type prefillDone struct {
	prefill *engine.Request
	at      engineIndex
	epoch   int // of that replica
	ended   time.Duration
}

// sendDecided sends a request where the router decided, or the prefill request of a split one.
func (r *run) sendDecided(f *request) {
	d := f.decision
	if f.prefill = d.Prefill; f.prefill != nil {
		f.predicted = f.prefill.MatchedTokens
		r.sendOrResubmit(f, f.prefill.Backend.Slot)
		return
	}
	if d.Split == decide.SplitDone { // its prefill was done before the replica for its decode refused it
		d.StartDecode()
	} else {
		f.predicted = d.MatchedTokens
	}
	r.sendOrResubmit(f, d.Backend.Slot)
}

// endPrefillRequest sends the decode request of a request whose prefill request has ended.
func (r *run) endPrefillRequest(f *request) {
	p := r.fleet[f.index]
	p.ranks[f.rank].engine.RenewLease(f.engine, math.MaxInt64)
	f.source = &prefillDone{f.engine, engineIndex{f.index, f.rank}, p.epoch, r.now}
	o := router.Outcome{End: router.Completed, OutputTokens: 1}
	if !r.NoUsage {
		o.PromptTokens, o.CachedTokens, o.CachedKnown = f.job.Prompt, f.engine.Cached, true
	}
	f.prefill.Release(o)
	f.prefill = nil
	f.decision.StartDecode()
	r.sendOrResubmit(f, f.decision.Backend.Slot)
}

// scheduleTransfers schedules the ends of the transfers that begin with the current step of an engine.
func (r *run) scheduleTransfers(at engineIndex) {
	p := r.fleet[at.replica]
	for _, q := range p.ranks[at.rank].step.Transferring {
		r.events.push(event{at: q.TransferEnd, kind: eventTransferEnd, index: at.replica, rank: at.rank, epoch: p.epoch, transfer: q})
	}
}

// endTransfer ends the transfer of a prompt's KV cache to a replica. It fails if the other one was restarted.
func (r *run) endTransfer(at engineIndex, q *engine.Request) {
	f, outcome := q.Owner.(*request), engine.TransferDone
	if s := f.source; q.Ended() || s == nil {
		return
	} else if r.fleet[s.at.replica].epoch != s.epoch {
		outcome = engine.TransferFailed
	}
	r.fleet[at.replica].ranks[at.rank].engine.EndTransfer(q, outcome)
	r.releaseSource(f)
}

// forgetPrefill gives up what the prefill request of a request has computed: it is not split again.
func (r *run) forgetPrefill(f *request) {
	r.releaseSource(f)
	f.source, f.routed.PrefilledOn, f.routed.Splittable = nil, nil, false
}

// releaseSource frees the blocks that the prefill request of a request has pinned, if any.
func (r *run) releaseSource(f *request) {
	if s := f.source; s != nil && r.fleet[s.at.replica].epoch == s.epoch {
		r.fleet[s.at.replica].ranks[s.at.rank].engine.ReleasePinned(s.prefill)
	}
}

// cachedTokens returns how many tokens of the prompt were not computed, as usage says.
func (f *request) cachedTokens() int {
	if f.source != nil {
		return f.source.prefill.Cached
	}
	return f.engine.Cached
}
