package estimate

import "math"

const (
	maxCapacityFactor = 16 // upper bound of the last bucket; that of the first is 0.2. A cache in host memory can be that much larger.
	bucketsPerDouble  = 5  // buckets from one bound to twice that
	bucketCount       = 32
	deviceBucketCount = 17                                   // up to twice the reported capacity
	reportedBucket    = bucketCount - 1 - 4*bucketsPerDouble // ends at the capacity that the replica reports

	// falsePositiveCost is what a block costs that is expected and absent, over
	// what one costs that is present and not expected. To send a request where its
	// prefix might be is cheap; to miss where it is costs the prefix's prefill.
	falsePositiveCost = 0.33
	evidenceDecay     = 0.998 // per comparison
	priorWeight       = 0.35  // predictions per bucket that the reported capacity counts for
	minMissingShare   = 0.1   // of one prediction, above which its last block was absent
	minGrowEvidence   = 0.5   // predictions found in the outermost bucket, or beyond, that open the next
)

// capacity estimates how much of its cache a replica has for us: shares of
// predicted blocks that were present and absent, by how many blocks were used since
// their last use. The buckets' bounds are multiples of the reported capacity.
type capacity struct {
	present, absent [bucketCount]float64 // predictions, decaying
	lastKept        int                  // the last bucket that the index keeps
	count           int                  // of buckets in use
}

func newCapacity() capacity { return capacity{lastKept: reportedBucket, count: bucketCount} }

// setHostTier says whether the replica may have a second cache, in host memory. Without one
// its cache is at most twice the reported size.
func (c *capacity) setHostTier(possible bool) {
	c.count = bucketCount
	if !possible {
		c.count = deviceBucketCount
	}
	c.lastKept = min(c.lastKept, c.count-1)
}

// capacityBucket returns the bucket of a reuse distance, in reported capacities; -1 for
// one so short that a missing block was not evicted for want of room.
func capacityBucket(reuseDistance float64) (bucket int) {
	if reuseDistance <= 0 {
		return -1
	}
	below := int(-bucketsPerDouble * math.Log2(reuseDistance/maxCapacityFactor))
	return max(-1, bucketCount-1-max(0, below))
}

// factor is the estimated capacity over the reported one.
func (c *capacity) factor() float64 {
	return maxCapacityFactor * math.Exp2(float64(c.lastKept-bucketCount+1)/bucketsPerDouble)
}

// minKeptEvidence is how many predictions were present, beside keptPerAbsent for each that was absent, where a
// cache keeps all blocks.
const (
	minKeptEvidence = 8
	keptPerAbsent   = 4
)

// keeps reports whether a cache has kept almost all blocks of a reuse distance, in reported capacities.
func (c *capacity) keeps(reuseDistance float64) bool {
	bucket := capacityBucket(reuseDistance)
	return bucket >= 0 && bucket < c.count && c.present[bucket] >= minKeptEvidence+keptPerAbsent*c.absent[bucket]
}

// addUnexpectedHit counts a hit on blocks that the index had evicted.
func (c *capacity) addUnexpectedHit() {
	if c.lastKept+1 < c.count {
		c.present[c.lastKept+1]++
	}
}

// updateLastKeptBucket sets lastKept to where keeping what is nearer and nothing farther would have been best,
// at most one bucket beyond where there is evidence. All evidence decays.
func (c *capacity) updateLastKeptBucket() {
	most := c.lastKept
	if most+1 < c.count && max(c.present[most], c.present[most+1]) >= minGrowEvidence {
		most++
	}
	sum, best := 0.0, 0.0
	c.lastKept = 0
	for i := range most + 1 {
		sum += c.present[i] - falsePositiveCost*c.absent[i]
		if i <= reportedBucket {
			sum += priorWeight
		}
		if sum >= best {
			best, c.lastKept = sum, i
		}
	}
	for i := range c.present {
		c.present[i] *= evidenceDecay
		c.absent[i] *= evidenceDecay
	}
}

// unevenText is the error of a prediction, as a share of it times the part of the
// prompt that did not match: tools have more tokens per byte than prose.
const unevenText = 0.25

// predictions are predicted hits by bucket; the last bucket is for blocks that cannot have been evicted.
type predictions struct {
	buckets  [bucketCount + 1]struct{ requests, tokens float64 }
	tokens   float64
	variance float64 // of tokens, as bytes are no exact measure of them
}

// addPrediction adds a predicted hit of so many of a prompt's tokens.
func (p *predictions) addPrediction(bucket int, hitTokens, promptTokens float64) {
	if bucket < 0 {
		bucket = bucketCount
	}
	p.buckets[bucket].requests++
	p.buckets[bucket].tokens += hitTokens
	p.tokens += hitTokens
	deviation := unevenText * hitTokens * max(0, 1-hitTokens/promptTokens)
	p.variance += deviation * deviation
}

// hitTokensMargin returns by how many tokens the hits may differ from those predicted.
func (p *predictions) hitTokensMargin(c CacheInfo) float64 {
	return max(c.Alignment, math.Sqrt(p.variance)+predictionTolerance*p.tokens)
}

// addEvidence counts which of the predicted tokens were present, and which were absent:
// the missing ones are taken to be those that were unused for longest.
func (c *capacity) addEvidence(p *predictions, missingTokens float64) {
	for bucket := bucketCount - 1; bucket >= 0; bucket-- {
		if p.buckets[bucket].tokens == 0 {
			continue
		}
		absent := min(missingTokens, p.buckets[bucket].tokens)
		missingTokens -= absent
		share := absent / p.buckets[bucket].tokens
		if p.buckets[bucket].requests == 1 && share > minMissingShare {
			share = 1 // the rest was used later, and belongs to a nearer bucket
		}
		c.absent[bucket] += share * p.buckets[bucket].requests
		c.present[bucket] += (1 - share) * p.buckets[bucket].requests
	}
}
