// Each simulation is one goroutine, in which the race detector would find nothing, in ten
// times the time.

package replay

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/router"
)

// shortBlock is how many tokens a block of the workloads below stands for: their
// prompts are too short for blocks of 512.
const shortBlock = 64

// conversations is a workload of chats that begin at random times and go on for a
// few turns. Each turn sends the conversation again, behind one of eight system
// prompts.
type conversations struct {
	rate   float64       // conversations that begin in a second
	length time.Duration // from the first to the last of them
}

const (
	systemTokens = 1024
	chatPause    = 8 * time.Second // mean, before the next turn
)

// conversation is one chat.
type conversation struct {
	chain        chain
	system, own  uint64 // ids of its blocks
	tokens, left int    // of the conversation so far; turns to come
	draw         *rand.Rand
}

// Requests draws the chats. Their turns follow from the responses' times.
func (w conversations) Requests(_ int, seed uint64) (*Requests, error) {
	draw := rand.New(rand.NewPCG(seed, 5))
	r := &Requests{BlockTokens: shortBlock}
	chats := map[uint64]*conversation{}
	for at := drawInterval(draw, w.rate); at < w.length; at += drawInterval(draw, w.rate) {
		n := uint64(len(chats) + 1)
		c := &conversation{
			system: mixBits(1<<40 + draw.Uint64N(8)), own: mixBits(1<<41 + n),
			tokens: systemTokens, left: interval{3, 8}.draw(draw), draw: rand.New(rand.NewPCG(seed, 1<<32+n)),
		}
		chats[n] = c
		r.Total += c.left
		r.Open = append(r.Open, c.turn(n, at))
	}
	r.Next = func(ended *Job, now time.Duration) *Job {
		c := chats[ended.Conversation]
		if c == nil || c.left == 0 {
			return nil
		}
		return c.turn(ended.Conversation, now+time.Duration(min(c.draw.ExpFloat64(), 4)*float64(chatPause)))
	}
	return r, nil
}

// turn makes the chat's next request.
func (c *conversation) turn(number uint64, at time.Duration) *Job {
	c.left--
	prompt, output := c.tokens+interval{20, 300}.draw(c.draw), interval{50, 300}.draw(c.draw)
	c.tokens = prompt + output
	for n := len(c.chain.cache); n < c.tokens/shortBlock; n++ {
		if n < systemTokens/shortBlock {
			c.chain.add(c.system)
		} else {
			c.chain.add(c.own)
		}
	}
	j := c.chain.newJob(at, prompt, output, shortBlock)
	j.PromptKey, j.Conversation = c.system, number
	return j
}

// lowPriorityJobs is a workload of requests that have nothing in common and come at random
// times.
type lowPriorityJobs struct {
	requests       int
	rate           float64  // a second
	prompt, output interval // tokens
	priority       int
}

func (w lowPriorityJobs) Requests(_ int, seed uint64) (*Requests, error) {
	draw := rand.New(rand.NewPCG(seed, 6))
	r := &Requests{BlockTokens: shortBlock, Total: w.requests}
	at := time.Duration(0)
	for n := range w.requests {
		prompt, output := w.prompt.draw(draw), w.output.draw(draw)
		var c chain
		for len(c.cache) < (prompt+output)/shortBlock {
			c.add(mixBits(1<<42 + uint64(n)))
		}
		at += drawInterval(draw, w.rate)
		j := c.newJob(at, prompt, output, shortBlock)
		j.Priority = w.priority
		r.Open = append(r.Open, j)
	}
	return r, nil
}

// beside plays chats and low-priority requests at once.
type beside struct {
	chats       conversations
	lowPriority lowPriorityJobs
	ended       func(*Job, time.Duration) // called for each low-priority request
}

func (w beside) Requests(backends int, seed uint64) (*Requests, error) {
	r, err := w.chats.Requests(backends, seed)
	if err != nil {
		return nil, err
	}
	lowPriority, err := w.lowPriority.Requests(backends, seed)
	if err != nil {
		return nil, err
	}
	r.Total += lowPriority.Total
	r.Open = append(r.Open, lowPriority.Open...)
	slices.SortStableFunc(r.Open, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	next := r.Next
	r.Next = func(ended *Job, now time.Duration) *Job {
		if ended.Priority > 0 {
			w.ended(ended, now)
			return nil
		}
		return next(ended, now)
	}
	return r, nil
}

// playLowPriority plays a workload on four replicas with the queue of config.yaml, but for
// its time: low-priority requests have keys with queue_time 24h.
func playLowPriority(t *testing.T, w Workload, seed uint64) Summary {
	t.Helper()
	s := Scenario{
		Backends: 4, Engine: linear, KVTokens: 400_000, Policy: "prefix", Seed: seed, Workload: w,
		Queue: router.QueueSettings{
			Requests: 10_000, Bytes: 512 << 20, LowPriorityRequests: 10_000, LowPriorityBytes: 384 << 20, NoneReadyTimeout: 24 * time.Hour,
			BusyTimeout: 24 * time.Hour, LowPrioritySlowdown: 0.05,
		},
	}
	got, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The low-priority requests, their number and how many of them four replicas complete in a
// second: TestLowPriorityAlone measures that.
var documents = lowPriorityJobs{requests: 10_000, prompt: interval{200, 800}, output: interval{50, 250}, priority: 10}

const lowPriorityCapacity = 52

// TestLowPriorityWithInteractiveRequests plays 10,000 low-priority requests at three times the
// fleet's capacity beside chats at about 45 % of it: none is lost, and the chats'
// p99 is at most 1.1 times of what it is without them.
func TestLowPriorityWithInteractiveRequests(t *testing.T) {
	t.Parallel()
	const seeds = 5
	chats := conversations{rate: 8, length: 5 * time.Minute}
	lowPriority := documents
	lowPriority.rate = 3 * lowPriorityCapacity
	var ttft, e2e float64
	for seed := range uint64(seeds) {
		before := 0
		without := playLowPriority(t, chats, seed)
		with := playLowPriority(t, beside{chats, lowPriority, func(_ *Job, now time.Duration) {
			if now <= chats.length {
				before++
			}
		}}, seed)
		if without.Lost+with.Lost+with.LowPriority.Lost > 0 || with.Requests != without.Requests ||
			with.LowPriority.Requests != lowPriority.requests {
			t.Errorf("seed %d: lost %v without low-priority requests, %v with, %v of these", seed, without.Errors, with.Errors,
				with.LowPriority.Errors)
		}
		t.Logf("seed %d: %d chat requests, p99 TTFT %.1f and %.1f ms (× %.3f), end to end %.2f and %.2f s (× %.3f); %d low-priority requests "+
			"beside them",
			seed, with.Requests, 1000*without.TTFTP99, 1000*with.TTFTP99, with.TTFTP99/without.TTFTP99,
			without.E2EP99, with.E2EP99, with.E2EP99/without.E2EP99, before)
		ttft += with.TTFTP99 / without.TTFTP99 / seeds
		e2e += with.E2EP99 / without.E2EP99 / seeds
	}
	t.Logf("mean of the ratios: p99 TTFT %.3f, end to end %.3f", ttft, e2e)
	if ttft > 1.1 || e2e > 1.1 {
		t.Errorf("p99 TTFT × %.3f, end to end × %.3f, want at most 1.1", ttft, e2e)
	}
}

// TestLowPriorityAlone holds that a fleet without interactive
// requests serves low-priority requests as it serves any.
func TestLowPriorityAlone(t *testing.T) {
	play := func(priority int) Summary {
		w := documents
		w.requests, w.rate, w.priority = 1000, 1000, priority
		return playLowPriority(t, w, 1)
	}
	lowPriority, plain := play(10).LowPriority, play(0)
	t.Logf("%.1f low-priority requests a second, %.1f of priority 0", lowPriority.Throughput, plain.Throughput)
	if lowPriority.Throughput != plain.Throughput || lowPriority.TTFTMean != plain.TTFTMean || lowPriority.E2EP99 != plain.E2EP99 {
		t.Errorf("low-priority requests %+v\nplain ones %+v", lowPriority, plain)
	}
}

// TestLowPriorityWithFewInteractiveRequests holds that a fleet with little interactive
// traffic keeps as many of its replicas free as that needs, and not more.
func TestLowPriorityWithFewInteractiveRequests(t *testing.T) {
	t.Parallel()
	const length = 10 * time.Minute
	for _, c := range []struct {
		rate    float64 // of conversations
		offered float64 // low-priority requests, over how many are completed without others
		must    float64 // of them, be completed
	}{{0.1, 0.7, 0.5}, {0.3, 0.6, 0.3}, {1, 0.25, 0.08}} {
		chats, lowPriority, before := conversations{c.rate, length}, documents, 0
		lowPriority.requests, lowPriority.rate = int(c.offered*lowPriorityCapacity*length.Seconds()), c.offered*lowPriorityCapacity
		without := playLowPriority(t, chats, 1)
		with := playLowPriority(t, beside{chats, lowPriority, func(_ *Job, now time.Duration) {
			if now <= length {
				before++
			}
		}}, 1)
		got := float64(before) / length.Seconds() / lowPriorityCapacity
		t.Logf("%g conversations a second, %d requests: low priority at %.2f of its rate without them; p99 TTFT %.1f and %.1f ms (× %.2f), "+
			"end to end × %.2f",
			c.rate, with.Requests, got, 1000*without.TTFTP99, 1000*with.TTFTP99, with.TTFTP99/without.TTFTP99, with.E2EP99/without.E2EP99)
		if with.Lost+with.LowPriority.Lost > 0 || got < c.must {
			t.Errorf("%g conversations a second leave low-priority requests %.2f of its rate, want %.2f at least; lost %v and %v", c.rate, got,
				c.must, with.Errors, with.LowPriority.Errors)
		}
	}
}

// interval is drawn from, both ends included.
type interval struct{ min, max int }

func (r interval) draw(from *rand.Rand) int { return r.min + from.IntN(r.max-r.min+1) }
