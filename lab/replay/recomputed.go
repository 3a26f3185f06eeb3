package replay

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"warmroute/lab/sim/engine"
)

// Recomputed says how many tokens of prompts the replicas computed, and why those that some replica had computed before were
// computed again. A block at the end of a prompt that is not full counts as computed for the first time.
type Recomputed struct {
	Computed float64 `json:"computed_tokens"`
	Distinct float64 `json:"distinct_tokens"` // computed for the first time; with the following the sum is Computed

	Elsewhere float64 `json:"elsewhere_tokens"` // another replica had them in its cache when the request was sent
	Evicted   float64 `json:"evicted_tokens"`   // no replica had them any more
	Gone      float64 `json:"gone_tokens"`      // those that had computed them had left or been restarted
	Unmatched float64 `json:"unmatched_tokens"` // its own replica had them and could not use them, or they were being computed

	Prompts           float64 `json:"prompt_tokens"`
	Requests          float64 `json:"requests"`
	RequestsElsewhere float64 `json:"requests_elsewhere"` // served by one replica while another held a longer prefix
}

// Lost returns how many tokens were computed again.
func (r *Recomputed) Lost() float64 { return r.Elsewhere + r.Evicted + r.Gone + r.Unmatched }

// fields returns the figures, which Mean averages.
func (r *Recomputed) fields() []*float64 {
	return []*float64{
		&r.Computed, &r.Distinct, &r.Elsewhere, &r.Evicted, &r.Gone, &r.Unmatched, &r.Prompts, &r.Requests, &r.RequestsElsewhere,
	}
}

// computedBlocks has the blocks that replicas have computed, and the figures that follow from them.
type computedBlocks struct {
	blocks  map[engine.BlockHash]*computedBlock
	figures Recomputed
}

// computedBlock is a block that some replica has computed.
type computedBlock struct {
	first time.Duration
	by    []replicaEpoch
}

// replicaEpoch is a replica between two restarts.
type replicaEpoch struct{ index, epoch int }

// cachedWhenSent is how many leading tokens of a request's prompt were cached when it was sent: on its own replica, and at most on
// any other.
type cachedWhenSent struct{ own, elsewhere int }

// lookUpCaches returns what is cached of a prompt that is sent to a replica.
func (r *run) lookUpCaches(f *request) (c cachedWhenSent) {
	for i, p := range r.fleet {
		if p.down || r.ModelOf != nil && r.ModelOf[i] != f.job.Model {
			continue
		}
		for rank := range p.ranks {
			if e := p.ranks[rank].engine; i == f.index && rank == f.rank {
				c.own = e.HeldTokens(f.job.Prompt, f.job.cache)
			} else {
				c.elsewhere = max(c.elsewhere, e.CachedTokens(f.job.Prompt, f.job.cache))
			}
		}
	}
	return c
}

// recordPrefill counts the tokens that a replica has computed of a prompt.
func (r *run) recordPrefill(f *request) {
	c, j, size := r.computed, f.job, r.requests.BlockTokens
	full := min(j.Prompt/size, len(j.cache))
	cached := f.engine.Cached
	x := &c.figures
	x.Prompts, x.Computed, x.Requests = x.Prompts+float64(j.Prompt), x.Computed+float64(j.Prompt-cached), x.Requests+1
	if f.cached.elsewhere > max(f.cached.own, cached) {
		x.RequestsElsewhere++
	}
	partial := &x.Distinct
	if f.counted { // it was computed by a replica that has been restarted since
		partial = &x.Gone
	}
	f.counted = true
	*partial += float64(j.Prompt - max(cached, full*size))
	for i := cached / size; i < full; i++ {
		cause := &x.Distinct
		if b := c.blocks[j.cache[i]]; b != nil {
			switch end := (i + 1) * size; {
			case end <= f.cached.own || b.first >= f.sent:
				cause = &x.Unmatched
			case end <= f.cached.elsewhere:
				cause = &x.Elsewhere
			case r.isAnyPresent(b.by):
				cause = &x.Evicted
			default:
				cause = &x.Gone
			}
		}
		*cause += float64((i+1)*size - max(cached, i*size))
	}
	r.recordComputed(f, cached/size, full)
}

// recordComputed records that a request's replica has computed its blocks from first to end.
func (r *run) recordComputed(f *request, first, end int) {
	by := replicaEpoch{f.index, r.fleet[f.index].epoch}
	for _, h := range f.job.cache[first:max(first, min(end, len(f.job.cache)))] {
		b := r.computed.blocks[h]
		if b == nil {
			b = &computedBlock{first: r.now}
			r.computed.blocks[h] = b
		}
		if len(b.by) == 0 || b.by[len(b.by)-1] != by {
			b.by = append(b.by, by)
		}
	}
}

// isAnyPresent reports whether one of the replicas still runs.
func (r *run) isAnyPresent(by []replicaEpoch) bool {
	for _, e := range by {
		if p := r.fleet[e.index]; !p.down && p.epoch == e.epoch {
			return true
		}
	}
	return false
}

// WriteRecomputed writes a table of the tokens that the policies computed again, as shares of those of the prompts, by cause.
func (r Report) WriteRecomputed(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\tcomputed\tfirst time\tagain\telsewhere\tevicted\tgone\tunmatched\trequests elsewhere\t")
	for _, s := range r.Results {
		x := s.Recomputed
		if x == nil || x.Prompts == 0 {
			continue
		}
		share := func(tokens float64) float64 { return 100 * tokens / x.Prompts }
		fmt.Fprintf(t, "%s\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t\n", s.Policy, share(x.Computed),
			share(x.Distinct), share(x.Lost()), share(x.Elsewhere), share(x.Evicted), share(x.Gone), share(x.Unmatched),
			100*x.RequestsElsewhere/x.Requests)
	}
	return t.Flush()
}
