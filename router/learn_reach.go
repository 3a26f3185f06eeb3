package router

import "math"

const (
	reachMost    = 2 // upper bound of the last bucket, in capacities that the replica reports; that of the first is 0.2
	reachDoubles = 5 // buckets from one bound to twice that
	reachBuckets = 17
	reported     = reachBuckets - 1 - reachDoubles // the bucket that ends where the replica says

	// gonePenalty is what a block that is not where it was looked for costs, over
	// what one costs that is not looked for where it is. To send a request where its
	// prefix might be is cheap; to forget where it is costs the prefix's prefill.
	gonePenalty  = 0.33
	reachForgets = 0.998 // what each comparison leaves of those before
	reachTrust   = 0.35  // predictions in each bucket that the replica's own figure is worth
	partlyGone   = 0.1   // of one prediction, and its last block was not there
	reachGrows   = 0.5   // predictions found in the outermost bucket, or beyond, that open the next
)

// reach is how far back in its use a replica's cache is found to go: shares of
// predicted blocks that were there and that were not, by how many blocks were
// used since they were. The bounds of the buckets are multiples of the capacity
// that the replica reports.
type reach struct {
	there, gone [reachBuckets]float64 // predictions, decaying
	edge        int                   // the last bucket that the index keeps
}

func newReach() reach { return reach{edge: reported} }

// bucketOf is the bucket of a distance, in capacities; -1 for one so short that
// what is not there was not evicted for want of room.
func bucketOf(far float64) int {
	if far <= 0 {
		return -1
	}
	below := int(-reachDoubles * math.Log2(far/reachMost))
	return max(-1, reachBuckets-1-max(0, below))
}

// factor is the size of the cache, as far as we are concerned, over what the
// replica reports.
func (c *reach) factor() float64 {
	return reachMost * math.Exp2(float64(c.edge-reachBuckets+1)/reachDoubles)
}

// beyond takes in that a replica held what had been evicted here.
func (c *reach) beyond() {
	if c.edge+1 < reachBuckets {
		c.there[c.edge+1]++
	}
}

// settle moves the edge to where keeping what is nearer and nothing farther
// would have been best, and one bucket farther than ever where the evidence so
// far goes on to the edge.
func (c *reach) settle() {
	most := c.edge
	if most+1 < reachBuckets && max(c.there[most], c.there[most+1]) >= reachGrows {
		most++
	}
	sum, best := 0.0, 0.0
	c.edge = 0
	for i := range most + 1 {
		sum += c.there[i] - gonePenalty*c.gone[i]
		if i <= reported {
			sum += reachTrust
		}
		if sum >= best {
			best, c.edge = sum, i
		}
	}
	for i := range c.there {
		c.there[i] *= reachForgets
		c.gone[i] *= reachForgets
	}
}

// foresight is what was predicted of some requests, by bucket; the last of all is
// for what cannot have been evicted.
type foresight struct {
	buckets  [reachBuckets + 1]struct{ requests, tokens float64 }
	sum      float64 // tokens
	variance float64 // of the sum, as text is no exact measure of tokens
}

// add takes in a prediction of so many of a prompt's tokens.
func (f *foresight) add(bucket int, tokens, prompt float64) {
	if bucket < 0 {
		bucket = reachBuckets
	}
	f.buckets[bucket].requests++
	f.buckets[bucket].tokens += tokens
	f.sum += tokens
	off := uneven * tokens * max(0, 1-tokens/prompt)
	f.variance += off * off
}

// learn takes in how many of the predicted tokens were there: what is missing
// is taken to be what was unused for longest.
func (c *reach) learn(f *foresight, missing float64) {
	for bucket := reachBuckets - 1; bucket >= 0; bucket-- {
		if f.buckets[bucket].tokens == 0 {
			continue
		}
		gone := min(missing, f.buckets[bucket].tokens)
		missing -= gone
		share := gone / f.buckets[bucket].tokens
		if f.buckets[bucket].requests == 1 && share > partlyGone {
			share = 1 // what is left of it was used later: it would be in a nearer bucket
		}
		c.gone[bucket] += share * f.buckets[bucket].requests
		c.there[bucket] += (1 - share) * f.buckets[bucket].requests
	}
}
