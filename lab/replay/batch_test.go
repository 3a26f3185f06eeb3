//go:build !race

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
		c := chats[ended.Session]
		if c == nil || c.left == 0 {
			return nil
		}
		return c.turn(ended.Session, now+time.Duration(min(c.draw.ExpFloat64(), 4)*float64(chatPause)))
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
	j.PromptKey, j.Session = c.system, number
	return j
}

// batchJobs is a workload of requests that have nothing in common and come at random
// times.
type batchJobs struct {
	requests       int
	rate           float64  // a second
	prompt, output interval // tokens
	priority       int
}

func (w batchJobs) Requests(_ int, seed uint64) (*Requests, error) {
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

// beside plays chats and batch requests at once.
type beside struct {
	chats conversations
	batch batchJobs
	ended func(*Job, time.Duration) // called for each batch request
}

func (w beside) Requests(backends int, seed uint64) (*Requests, error) {
	r, err := w.chats.Requests(backends, seed)
	if err != nil {
		return nil, err
	}
	batch, err := w.batch.Requests(backends, seed)
	if err != nil {
		return nil, err
	}
	r.Total += batch.Total
	r.Open = append(r.Open, batch.Open...)
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

// playBatch plays a workload on four replicas with the queue of config.yaml, but for
// its time: batch requests have keys with queue_time 24h.
func playBatch(t *testing.T, w Workload, seed uint64) Summary {
	t.Helper()
	s := Scenario{
		Backends: 4, Engine: linear, KVTokens: 400_000, Policy: "prefix", Seed: seed, Workload: w,
		Queue: router.QueueSettings{
			Requests: 10_000, Bytes: 512 << 20, BatchRequests: 10_000, BatchBytes: 384 << 20, NoneReadyTimeout: 24 * time.Hour, BusyTimeout: 24 * time.Hour, BatchSlowdown: 0.05,
		},
	}
	got, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The batch requests, their number and how many of them four replicas complete in a
// second: TestBatchAlone measures that.
var documents = batchJobs{requests: 10_000, prompt: interval{200, 800}, output: interval{50, 250}, priority: 10}

const batchCapacity = 52

// TestBatchWithInteractiveRequests plays 10,000 batch requests at three times the
// fleet's capacity beside chats at about 45 % of it: none is lost, and the chats'
// p99 is at most 1.1 times of what it is without them.
func TestBatchWithInteractiveRequests(t *testing.T) {
	t.Parallel()
	const seeds = 5
	chats := conversations{rate: 8, length: 5 * time.Minute}
	batch := documents
	batch.rate = 3 * batchCapacity
	var ttft, e2e float64
	for seed := range uint64(seeds) {
		before := 0
		without := playBatch(t, chats, seed)
		with := playBatch(t, beside{chats, batch, func(_ *Job, now time.Duration) {
			if now <= chats.length {
				before++
			}
		}}, seed)
		if without.Lost+with.Lost+with.Batch.Lost > 0 || with.Requests != without.Requests || with.Batch.Requests != batch.requests {
			t.Errorf("seed %d: lost %v without batch, %v with, %v of batch", seed, without.Errors, with.Errors, with.Batch.Errors)
		}
		t.Logf("seed %d: %d chat requests, p99 TTFT %.1f and %.1f ms (× %.3f), end to end %.2f and %.2f s (× %.3f); %d batch requests beside them",
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

// TestBatchAlone holds that a fleet without interactive
// requests serves batch requests as it serves any.
func TestBatchAlone(t *testing.T) {
	play := func(priority int) Summary {
		w := documents
		w.requests, w.rate, w.priority = 1000, 1000, priority
		return playBatch(t, w, 1)
	}
	batch, plain := play(10).Batch, play(0)
	t.Logf("%.1f batch requests a second, %.1f of priority 0", batch.Throughput, plain.Throughput)
	if batch.Throughput != plain.Throughput || batch.TTFTMean != plain.TTFTMean || batch.E2EP99 != plain.E2EP99 {
		t.Errorf("batch requests %+v\nplain ones %+v", batch, plain)
	}
}

// TestBatchWithFewInteractiveRequests holds that a fleet with little interactive
// traffic keeps as many of its replicas free as that needs, and not more.
func TestBatchWithFewInteractiveRequests(t *testing.T) {
	t.Parallel()
	const length = 10 * time.Minute
	for _, c := range []struct {
		rate    float64 // of conversations
		offered float64 // batch requests, over how many are completed without others
		must    float64 // of them, be completed
	}{{0.1, 0.7, 0.5}, {0.3, 0.6, 0.3}, {1, 0.25, 0.08}} {
		chats, batch, before := conversations{c.rate, length}, documents, 0
		batch.requests, batch.rate = int(c.offered*batchCapacity*length.Seconds()), c.offered*batchCapacity
		without := playBatch(t, chats, 1)
		with := playBatch(t, beside{chats, batch, func(_ *Job, now time.Duration) {
			if now <= length {
				before++
			}
		}}, 1)
		got := float64(before) / length.Seconds() / batchCapacity
		t.Logf("%g conversations a second, %d requests: batch at %.2f of its rate without them; p99 TTFT %.1f and %.1f ms (× %.2f), end to end × %.2f",
			c.rate, with.Requests, got, 1000*without.TTFTP99, 1000*with.TTFTP99, with.TTFTP99/without.TTFTP99, with.E2EP99/without.E2EP99)
		if with.Lost+with.Batch.Lost > 0 || got < c.must {
			t.Errorf("%g conversations a second leave batch %.2f of its rate, want %.2f at least; lost %v and %v", c.rate, got, c.must, with.Errors, with.Batch.Errors)
		}
	}
}

// interval is drawn from, both ends included.
type interval struct{ min, max int }

func (r interval) draw(from *rand.Rand) int { return r.min + from.IntN(r.max-r.min+1) }
