package replay

import (
	"errors"
	"slices"

	"warmroute/router/prompt"
	"warmroute/sim/engine"
)

// Traced plays a trace: every request when it is due, whatever became of those
// before it.
type Traced struct {
	Trace *Trace  // not changed; its stamps as they were recorded
	Load  float64 // that the arrivals are stretched or squeezed to; 0: as recorded
}

// Requests spreads equal stamps and takes earlier answers for parts of later
// prompts.
func (w Traced) Requests(backends int, seed uint64) (*Requests, error) {
	if w.Trace == nil || len(w.Trace.Requests) == 0 {
		return nil, errors.New("the trace holds no request")
	}
	t := &Trace{BlockTokens: w.Trace.BlockTokens, Requests: slices.Clone(w.Trace.Requests)}
	t.Spread(seed)
	if w.Load > 0 {
		t.Stretch(w.Load, backends)
	}
	later := w.Trace.continuations()
	r := &Requests{BlockTokens: w.Trace.BlockTokens, Total: len(t.Requests), Open: make([]*Job, 0, len(t.Requests))}
	start := t.Requests[0].At
	for i := range t.Requests {
		q := &t.Requests[i]
		job := q.job(w.Trace.BlockTokens, uint64(i), later[i])
		job.At -= start
		r.Open = append(r.Open, job)
	}
	return r, nil
}

// job makes the request, its answer's blocks being those of the later request
// that continues it, or nobody's.
func (q *TraceRequest) job(blockTokens int, number uint64, later *TraceRequest) *Job {
	full, all := q.PromptTokens/blockTokens, (q.PromptTokens+q.AnswerTokens)/blockTokens
	c := chain{names: make([]prompt.Block, 0, all), cache: make([]engine.BlockHash, 0, all)}
	for _, id := range q.Blocks[:full] {
		c.add(id)
	}
	for i := full; i < all; i++ {
		if later != nil && i < len(later.Blocks) {
			c.add(later.Blocks[i])
		} else {
			c.add(mix(number)) // 64 bits drawn at random meet no id of a trace
		}
	}
	job := c.job(q.At, q.PromptTokens, q.AnswerTokens, blockTokens)
	// All requests of Mooncake's traces begin with the same block.
	head := mix(q.Blocks[min(1, len(q.Blocks)-1)])
	job.Head, job.Session, job.Whole = head, head, q.Whole
	if q.Session != 0 {
		job.Session = mix(q.Session)
	}
	return job
}

// continuations finds for each request the next one that sends its prompt and
// answer again with more behind them, or nil. Stamps play no part in it, so one
// answer holds for every seed and load. Safe for concurrent use.
func (t *Trace) continuations() []*TraceRequest {
	t.continuing.Lock()
	defer t.continuing.Unlock()
	if t.later == nil {
		t.later = continuations(t.Requests, t.BlockTokens)
	}
	return t.later
}

// continuations is linear in the blocks of all prompts, but for a logarithm. A
// prompt of one full block says nothing: the first is everybody's.
func continuations(requests []TraceRequest, blockTokens int) []*TraceRequest {
	heads := make([]uint64, len(requests)) // all of a prompt's full blocks, chained
	// For each of them, who begins with it of the requests seen so far, which is
	// from the last to the first. Among them only those that are longer than all
	// after them here: a shorter one is never the next that is long enough.
	longer := make(map[uint64][]int32)
	for i := range requests {
		if q := &requests[i]; q.PromptTokens/blockTokens >= 2 {
			for _, id := range q.Blocks[:q.PromptTokens/blockTokens] {
				heads[i] = link(heads[i], id)
			}
			longer[heads[i]] = nil
		}
	}
	later := make([]*TraceRequest, len(requests))
	for i, q := range slices.Backward(requests) {
		if heads[i] != 0 {
			later[i] = nextLonger(requests, longer[heads[i]], q.PromptTokens+q.AnswerTokens)
		}
		head := uint64(0)
		for _, id := range q.Blocks[:q.PromptTokens/blockTokens] {
			head = link(head, id)
			list, wanted := longer[head]
			if !wanted {
				continue
			}
			for n := len(list); n > 0 && requests[list[n-1]].PromptTokens <= q.PromptTokens; n-- {
				list = list[:n-1]
			}
			longer[head] = append(list, int32(i))
		}
	}
	return later
}

// nextLonger is the last of list, whose prompts get shorter, of more than so many tokens.
func nextLonger(requests []TraceRequest, list []int32, tokens int) *TraceRequest {
	n, _ := slices.BinarySearchFunc(list, tokens, func(k int32, tokens int) int {
		if requests[k].PromptTokens > tokens {
			return -1
		}
		return 1
	})
	if n == 0 {
		return nil
	}
	return &requests[list[n-1]]
}
