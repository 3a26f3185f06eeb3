package replay

import (
	"math"
	"math/rand/v2"
	"sort"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/prompt"
)

// Workload generates the requests of a run in virtual time: lengths and blocks
// without any text.
type Workload interface {
	// Requests returns the requests for this many backends. The same seed gives the
	// same requests.
	Requests(backends int, seed uint64) (*Requests, error)
}

// Requests are the requests of one run.
type Requests struct {
	BlockTokens int // that a block stands for
	KVTokens    int // of each replica, if the scenario sets none; 0: not set
	Total       int // number of requests
	Sessions    int // of a closed loop; 0: an open loop
	// Open are the requests with a fixed time of arrival, in that order.
	Open []*Job
	// Next returns what a client sends when a request of its has ended, now, or nil.
	// It is nil in an open loop.
	Next func(ended *Job, now time.Duration) *Job
}

// Job is one request. Never modified once created.
type Job struct {
	At                      time.Duration   // when its client sends it, since the run began
	Prompt, Output          int             // tokens
	PromptKey, Conversation uint64          // as in router.Request
	Turn                    prompt.TurnKind // the same
	NotStreamed             bool            // its first event cannot be seen
	Priority                int             // as in router.Request
	Model                   int             // that it is for; see Scenario.ModelOf

	Blocks []prompt.Block     // full ones of the prompt
	Reply  []prompt.Block     // full ones that the output adds
	cache  []engine.BlockHash // both, for the engine

	session session // of a closed loop
}

// chain turns ids into blocks, each of which stands for its id and all before it.
type chain struct {
	last  uint64
	names []prompt.Block
	cache []engine.BlockHash // the same, for the engine
}

func (c *chain) add(id uint64) {
	c.last = chainHash(c.last, id)
	c.names = append(c.names, prompt.Block(c.last))
	c.cache = append(c.cache, engine.BlockHash(c.last))
}

// chainHash returns the hash of a chain and a further id.
func chainHash(chained, id uint64) uint64 { return mixBits(chained ^ mixBits(id+1)) }

// newJob returns a request whose prompt and output consist of the chain's blocks, as
// far as they are full. The chain may grow later.
func (c *chain) newJob(at time.Duration, promptTokens, outputTokens, blockTokens int) *Job {
	full := min(promptTokens/blockTokens, len(c.cache))
	all := min((promptTokens+outputTokens)/blockTokens, len(c.cache))
	return &Job{
		At: at, Prompt: promptTokens, Output: outputTokens,
		Blocks: c.names[:full:full], Reply: c.names[full:all:all], cache: c.cache[:all:all],
	}
}

// mixBits is the finalizer of SplitMix64.
func mixBits(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Zipf draws from 0 to n-1, k with a weight of 1/(k+1)^s. Unlike rand.Zipf it
// allows s below 1, where real traffic often is.
type Zipf []float64 // cumulative weights

// NewZipf returns a distribution over n values.
func NewZipf(n int, s float64) Zipf {
	z, total := make(Zipf, n), 0.0
	for k := range z {
		total += math.Pow(float64(k+1), -s)
		z[k] = total
	}
	return z
}

// Draw returns a value drawn with from.
func (z Zipf) Draw(from *rand.Rand) int {
	at := from.Float64() * z[len(z)-1]
	return min(sort.SearchFloat64s(z, at), len(z)-1)
}

// drawLognormal draws from a log-normal distribution.
func drawLognormal(draw *rand.Rand, mu, sigma float64) float64 {
	return math.Exp(mu + sigma*draw.NormFloat64())
}

// roundTokens rounds a length to between 1 and maxTokens.
func roundTokens(length float64, maxTokens int) int {
	return int(min(max(1, math.Round(length)), float64(maxTokens)))
}
