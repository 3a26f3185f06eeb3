package ledger

import (
	"math"
	"math/bits"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
)

// defaultCheckpointTokens is how many tokens of a cache a checkpoint takes if the replica does not report what tells it, in
// alignments: most models have three groups of states.
const defaultCheckpointTokens = 3

// A replica reports how many tokens fit its cache in running requests that are as long as the model allows. Besides its tokens such
// a request needs two states of each group of linear attention, of which a checkpoint needs one, or, of each group of a sliding window,
// the window, the tokens that may be scheduled at a time, and a block. If these do not tell the window, it is about an eighth of them.
const (
	checkpointShareOfStates = 0.5
	checkpointShareOfWindow = 0.12
	maxWindowGroups         = 16 // that slidingWindows tries
)

// updateCheckpointSizes passes the results of checkpointSizes to the index.
func (l *Ledger) updateCheckpointSizes(slot int, load *backends.Load) {
	cost, window := l.checkpointSizes(slot, load)
	l.index.SetCheckpointCost(slot, cost)
	l.index.SetSlidingWindow(slot, window)
}

// checkpointSizes returns how many blocks of the index a checkpoint of a replica takes the room of, and the length of the sliding window
// in blocks; 0: the replica can reuse each block, or the window is unknown.
func (l *Ledger) checkpointSizes(slot int, load *backends.Load) (cost, window int) {
	if !load.KeepsCheckpoints || load.PrefixCachingOff {
		return 0, 0
	}
	tokens, windowTokens := float64(defaultCheckpointTokens*load.HitAlignment), 0
	if longest := l.contextLength(slot); longest > 0 && load.CacheTokens > 0 && load.CacheTokens < load.PoolTokens {
		extra := float64(longest) * (float64(load.PoolTokens)/float64(load.CacheTokens) - 1)
		switch groups, size := slidingWindows(extra/float64(load.HitAlignment), longest, load.BlockSize); {
		case load.AlignsStates:
			tokens = checkpointShareOfStates * extra
		case size > 0: // each of its blocks takes the room of one of full attention
			tokens, windowTokens = float64(groups*size/load.BlockSize*load.HitAlignment), size
		default:
			tokens = checkpointShareOfWindow * extra
		}
	}
	perToken := l.estimates.BackendBytesPerToken(slot) / float64(l.blockBytes)
	return max(1, int(tokens*perToken)), int(float64(windowTokens) * perToken)
}

// FindCheckpoint returns up to where a backend that keeps checkpoints can reuse a prompt, of which it holds blocks. Where these are
// dense that is their end, as if a checkpoint were there. ok is false if the backend can reuse each block.
func (l *Ledger) FindCheckpoint(slot int, blocks []prompt.Block, sizes *estimate.TokenSizes) (p index.Checkpoint, ok bool) {
	if !l.index.HasCheckpoints(slot) {
		return p, false
	}
	if p = l.index.FindCheckpoint(slot, blocks); p.Dense {
		alignment := l.cacheInfo(slot).Alignment
		tokens := alignDown(sizes.CountTokens(len(blocks)*l.blockBytes, nil), alignment)
		if tokens > p.Tokens {
			p.Tokens, p.Blocks, p.Certain = tokens, len(blocks), false
		}
	}
	return p, true
}

// slidingWindows returns how many groups of sliding windows a replica has and of how many tokens they are, by how many blocks a request
// of the longest length needs besides those of its own tokens, and the tokens in a block of a window. The window and the tokens that may
// be scheduled at a time are nearly always powers of two, and the window is the smaller one, so the sum of both tells them. It returns
// 0, 0 if no number of groups has such a sum.
func slidingWindows(blocks float64, longest, blockTokens int) (groups, tokens int) {
	n := int(math.Round(blocks))
	if math.Abs(blocks-float64(n)) > 0.1 {
		return 0, 0
	}
	for groups = 1; groups <= min(n/2, maxWindowGroups); groups++ {
		sum := uint(n/groups - 1) // blocks of one group
		if n%groups != 0 || int(sum)*blockTokens >= longest {
			continue
		}
		switch bits.OnesCount(sum) {
		case 1:
			return groups, int(sum) / 2 * blockTokens
		case 2:
			return groups, int(sum&-sum) * blockTokens
		}
	}
	return 0, 0
}

// contextLength returns how many tokens a prompt of a backend's models has at most; 0: unknown.
func (l *Ledger) contextLength(slot int) (tokens int) {
	for _, m := range l.accounts[slot].backend.Models() {
		tokens = max(tokens, m.MaxTokens)
	}
	return tokens
}

// addExpectedCheckpoints adds the checkpoints that a request which is being sent is expected to leave: what is sent after it finds them,
// since a replica prefills in the order of arrival. correctCheckpoints replaces them once the replica has reported how long the prompt is.
func (l *Ledger) addExpectedCheckpoints(e *Entry) {
	p := &e.Prediction
	if p.Checkpoint == nil || !p.IsText || p.IsTooLong || e.NonGenerative || e.RequestKind == DecodeRequest {
		return
	}
	if p.Checkpoint.Tokens > 0 {
		l.index.AddCheckpoint(&e.pin, p.Checkpoint.Blocks, p.Checkpoint.Tokens, false)
	}
	s := l.boundaries(e, p.PromptTokens)
	s.add(p.Checkpoint.Tokens, func(i, block, tokens int) {
		if l.index.AddCheckpoint(&e.pin, block, tokens, false) {
			e.expected[i] = int32(block)
		}
	})
}

// removeExpectedCheckpoints removes the checkpoints that addExpectedCheckpoints has added.
func (l *Ledger) removeExpectedCheckpoints(e *Entry) {
	for i, block := range e.expected {
		if block > 0 {
			l.index.RemoveGuess(&e.pin, int(block))
		}
		e.expected[i] = 0
	}
}

// correctCheckpoints records what a replica has reported of a request: the checkpoint that it reused, those deeper ones that it
// did not, and those that it has left.
func (l *Ledger) correctCheckpoints(e *Entry, o *Outcome) {
	p := &e.Prediction
	hasMedia := p.Media != (prompt.MediaCounts{})
	if p.Checkpoint == nil || !o.CachedKnown || o.PromptTokens <= 0 || o.CachedTokens > o.PromptTokens ||
		!p.IsText && !hasMedia || p.IsTooLong || e.NonGenerative || e.RequestKind == DecodeRequest {
		return
	}
	l.removeExpectedCheckpoints(e)
	s := l.boundaries(e, float64(o.PromptTokens))
	l.index.RemoveCheckpoints(&e.pin, p.HeldBlocks, o.CachedTokens)
	if hasMedia { // where other boundaries than those at its ends lie is not known
		if o.CachedTokens == p.Checkpoint.Tokens {
			l.index.AddCheckpoint(&e.pin, p.Checkpoint.Blocks, o.CachedTokens, true)
		}
		l.index.AddCheckpoint(&e.pin, s.blocks, s.floor(s.prompt-1), false)
		return
	}
	if c := o.CachedTokens; c > 0 {
		block := s.block(float64(c))
		switch {
		case c == p.Checkpoint.Tokens:
			block = p.Checkpoint.Blocks
		case p.HeldBlocks > 0 && float64(c) < s.held+2*s.blockTokens: // what follows the held blocks may be equal up to there
			block = min(block, p.HeldBlocks)
		}
		l.index.AddCheckpoint(&e.pin, block, c, true)
	}
	s.add(o.CachedTokens, func(i, block, tokens int) {
		l.index.AddCheckpoint(&e.pin, block, tokens, i == atEnd)
	})
}

// boundaries are where a request of a replica that keeps checkpoints leaves some.
type boundaries struct {
	alignment, prompt float64 // tokens
	held              float64 // tokens that the replica had, whether or not it could reuse them
	heldBlocks        int
	blocks            int // of the prompt
	blockTokens       float64
}

// boundaries returns those of a request whose prompt has so many tokens.
func (l *Ledger) boundaries(e *Entry, promptTokens float64) boundaries {
	p := &e.Prediction
	blockTokens := promptTokens * float64(l.blockBytes) / float64(max(1, p.Bytes))
	return boundaries{
		alignment: l.cacheInfo(e.Slot).Alignment, prompt: promptTokens, held: float64(p.HeldBlocks) * blockTokens, heldBlocks: p.HeldBlocks,
		blocks: p.Bytes / l.blockBytes, blockTokens: blockTokens,
	}
}

// block returns the number, from 1, of the block with which a prompt has reached the boundary after so many tokens: the next one
// than the estimated one, for the error of that. What follows the last whole block counts as part of it, since the next turn
// continues it.
func (s *boundaries) block(tokens float64) int {
	return max(1, min(int(math.Ceil(tokens/s.blockTokens))+1, s.blocks))
}

// floor returns the last boundary that may have a checkpoint in so many tokens.
func (s *boundaries) floor(tokens float64) int {
	return alignDown(tokens, s.alignment)
}

// alignDown returns the largest multiple of an alignment that is at most tokens.
func alignDown(tokens, alignment float64) int {
	return int(math.Floor(tokens/alignment) * alignment)
}

// The checkpoints that a request leaves.
const (
	atEnd  = iota // of its prompt
	atFork        // where it left what the replica had
)

// add calls f with the checkpoints that a request leaves of which cached tokens were reused. The one at a fork is a guess, since it
// is estimated how many tokens the blocks before it have. It is left out if it may be what was reused.
func (s *boundaries) add(cached int, f func(i, block, tokens int)) {
	held := s.held
	if held > 0 && s.alignment <= s.blockTokens { // what follows the held blocks is equal for half a block in the mean
		held += s.blockTokens / 2
	}
	end, fork := s.floor(s.prompt-1), s.floor(min(held, s.prompt-1))
	if fork < end && (cached == 0 && fork > 0 || float64(fork) > float64(cached)+s.alignment) {
		f(atFork, min(s.block(float64(fork)), s.heldBlocks), fork)
	}
	if end > cached {
		block := s.block(float64(end))
		if end == fork { // what was held reaches it
			block = min(block, s.heldBlocks)
		}
		f(atEnd, block, end)
	}
}
