package engine

import (
	"slices"
	"testing"
	"time"
)

// transferConfig is an engine with ten blocks of KV cache, and transfers that take 20 ms and 10 ms for each block.
func transferConfig() Config {
	return Config{
		KVTokens: 160, QuadraticDepth: LinearPrefill, Lease: time.Second,
		TransferTime: 20 * time.Millisecond, TransferTokenBytes: 100, TransferBandwidth: 160_000,
	}
}

// addPrefillRequest queues a prefill request.
func addPrefillRequest(t *testing.T, e *Engine, prompt int, hashes []BlockHash, now time.Duration) *Request {
	t.Helper()
	r := &Request{Prompt: prompt, Output: 1, Blocks: hashes, PrefillRequest: true}
	if err := e.Add(r, now); err != nil {
		t.Fatal(err)
	}
	return r
}

// addDecodeRequest queues a request whose whole prompt is remote.
func addDecodeRequest(t *testing.T, e *Engine, prompt, output int, hashes []BlockHash, now time.Duration) *Request {
	t.Helper()
	r := &Request{Prompt: prompt, Output: output, Blocks: hashes, RemoteTokens: prompt}
	if err := e.Add(r, now); err != nil {
		t.Fatal(err)
	}
	return r
}

// runTransfers steps e until r has ended, and ends each transfer when its time is over. It returns r's end.
func runTransfers(t *testing.T, e *Engine, r *Request, outcome TransferOutcome, now time.Duration) time.Duration {
	t.Helper()
	var open []*Request
	for range 100_000 {
		for _, q := range open {
			if q.TransferEnd <= now {
				e.EndTransfer(q, outcome)
			}
		}
		step := e.Step(now)
		open = append(open, step.Transferring...)
		now = step.End
		if slices.Contains(step.Finished, r) {
			return now
		}
	}
	t.Fatal("the request did not end")
	return 0
}

func TestPinnedBlocks(t *testing.T) {
	for _, c := range []struct {
		name    string
		act     func(e *Engine, q *Request, end time.Duration)
		after   time.Duration // of the request's end
		pinned  bool
		expired int64
	}{
		{"within the lease", func(*Engine, *Request, time.Duration) {}, 999 * time.Millisecond, true, 0},
		{"lease over", func(*Engine, *Request, time.Duration) {}, time.Second, false, 1},
		{"released", func(e *Engine, q *Request, _ time.Duration) { e.ReleasePinned(q) }, 0, false, 0},
		{"aborted", func(e *Engine, q *Request, _ time.Duration) { e.Abort(q) }, 0, false, 0},
		{"renewed", func(e *Engine, q *Request, end time.Duration) { e.RenewLease(q, end+2*time.Second) }, 1999 * time.Millisecond, true, 0},
		{"renewed, and over", func(e *Engine, q *Request, end time.Duration) { e.RenewLease(q, end+2*time.Second) }, 2 * time.Second, false, 1},
		{"renewed for less than is left", func(e *Engine, q *Request, end time.Duration) {
			e.RenewLease(q, end+time.Millisecond)
		}, 999 * time.Millisecond, true, 0},
		{"cache discarded", func(e *Engine, _ *Request, end time.Duration) { e.DiscardCache(end) }, 0, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(transferConfig())
			q := addPrefillRequest(t, e, 40, blocks(1, 2), 0)
			end := finish(t, e, q, 0)
			if st := e.Stats(); st.KVUsage != 0.3 || st.Pinned != 1 || len(q.PinnedBlocks()) != 3 || !e.Idle() {
				t.Fatalf("after the request's end: %+v, %v pinned, want 3 of 10 blocks and an idle engine", st, q.PinnedBlocks())
			}
			c.act(e, q, end)
			e.ExpireLeases(end + c.after)
			usage, count := 0.0, 0
			if c.pinned {
				usage, count = 0.3, 1
			}
			if st := e.Stats(); st.KVUsage != usage || st.Pinned != count || st.ExpiredLeases != c.expired || len(q.PinnedBlocks()) != 3*count {
				t.Errorf("%+v, %v pinned, want usage %v and %d expired", st, q.PinnedBlocks(), usage, c.expired)
			}
			if e.ResetPrefixCache() == c.pinned {
				t.Errorf("cache reset %v, while blocks are pinned %v", !c.pinned, c.pinned)
			}
			if e.RenewLease(q, end+time.Hour) != c.pinned || e.ReleasePinned(q) != c.pinned || e.ReleasePinned(q) || e.Stats().KVUsage != 0 {
				t.Errorf("renewed and released once: want %v", c.pinned)
			}
		})
	}
}

// TestPinnedBlocksAreNotAllocated adds a request for which there is room only when the lease of pinned blocks is over.
func TestPinnedBlocksAreNotAllocated(t *testing.T) {
	e := newEngine(transferConfig())
	end := finish(t, e, addPrefillRequest(t, e, 40, blocks(1, 2), 0), 0)
	hit := add(t, e, 33, 1, blocks(1, 2), end)
	now := finish(t, e, hit, end)
	if hit.Cached != 32 {
		t.Errorf("hit %d tokens of pinned blocks, want 32", hit.Cached)
	}
	big := add(t, e, 150, 1, blocks(2, 9), now)
	finish(t, e, big, now)
	if early, late := end+time.Second, end+time.Second+8*time.Millisecond; big.Started < early || big.Started > late {
		t.Errorf("started at %v, want between %v and %v", big.Started, early, late)
	}
}

func TestTransfer(t *testing.T) {
	for _, c := range []struct {
		name        string
		cached      int // leading blocks that are in the cache before
		remote      int // RemoteTokens of a prompt of 70 tokens
		outcome     TransferOutcome
		transferred int
		took        time.Duration // to the end of the only token
	}{
		// 70 tokens take 20 ms and 43.75 ms; the next steps begin at 64 ms and take 8 ms and 1 token.
		{"all", 0, 70, TransferDone, 70, 72*time.Millisecond + 125*time.Microsecond},
		{"what is cached is not transferred", 2, 70, TransferDone, 38, 56*time.Millisecond + 125*time.Microsecond},
		{"all but a part of a block is cached", 4, 70, TransferDone, 6, 32*time.Millisecond + 125*time.Microsecond},
		{"only the beginning is remote", 0, 32, TransferDone, 32, 48*time.Millisecond + 38*125*time.Microsecond},
		{"the beginning is remote and cached", 2, 32, TransferDone, 0, 8*time.Millisecond + 38*125*time.Microsecond},
		{"more than the prompt", 0, 100, TransferDone, 70, 72*time.Millisecond + 125*time.Microsecond},
		{"failed", 0, 70, TransferFailed, 0, 72*time.Millisecond + 70*125*time.Microsecond},
		{"failed, some was cached", 2, 70, TransferFailed, 0, 56*time.Millisecond + 38*125*time.Microsecond},
		{"corrupt", 0, 70, TransferCorrupt, 70, 72*time.Millisecond + 125*time.Microsecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(transferConfig())
			begun := time.Duration(0)
			if c.cached > 0 {
				begun = finish(t, e, add(t, e, 16*c.cached+1, 1, blocks(1, c.cached), 0), 0)
			}
			before := e.Stats()
			r := &Request{Prompt: 70, Output: 1, Blocks: blocks(1, 4), RemoteTokens: c.remote}
			if err := e.Add(r, begun); err != nil {
				t.Fatal(err)
			}
			end := runTransfers(t, e, r, c.outcome, begun)
			if took := end - begun; took != c.took {
				t.Errorf("took %v, want %v", took, c.took)
			}
			if r.Transferred != c.transferred || r.Cached != 16*c.cached || r.Corrupt != (c.outcome == TransferCorrupt) {
				t.Errorf("%d tokens transferred, %d cached, corrupt %v; want %d transferred", r.Transferred, r.Cached, r.Corrupt, c.transferred)
			}
			st := e.Stats()
			if got := st.LoadedPromptTokens; got != int64(c.transferred) {
				t.Errorf("counted %d loaded tokens, want %d", got, c.transferred)
			}
			if got, want := st.PromptTokens-before.PromptTokens-(st.CachedPromptTokens-before.CachedPromptTokens),
				int64(70-16*c.cached-c.transferred); got != want {
				t.Errorf("counted %d computed tokens, want %d", got, want)
			}
			if got, want := r.Created, max(0, 64-16*c.cached-c.transferred); got != want {
				t.Errorf("created %d cached tokens, want %d", got, want)
			}
			// What was transferred can be hit, and has the same fault.
			again := add(t, e, 70, 1, blocks(1, 4), end)
			finish(t, e, again, end)
			if again.Cached != 64 || again.Corrupt != r.Corrupt {
				t.Errorf("the same prompt hit %d tokens, corrupt %v; want 64 and %v", again.Cached, again.Corrupt, r.Corrupt)
			}
		})
	}
}

// TestTransferFillsCompleteBlock transfers a prompt whose last token fills a block: that is cached, though the token is
// computed again.
func TestTransferFillsCompleteBlock(t *testing.T) {
	e := newEngine(transferConfig())
	end := runTransfers(t, e, addDecodeRequest(t, e, 32, 1, blocks(1, 2), 0), TransferDone, 0)
	longer := add(t, e, 40, 1, blocks(1, 2), end)
	finish(t, e, longer, end)
	if longer.Cached != 32 {
		t.Errorf("hit %d tokens, want 32", longer.Cached)
	}
}

func TestTransferBesideDecodes(t *testing.T) {
	e := newEngine(transferConfig())
	busy := add(t, e, 17, 30, nil, 0)
	now := e.Step(0).End
	// Two prompts of two blocks: the second's copy follows the first's.
	first, second := addDecodeRequest(t, e, 32, 1, blocks(1, 2), now), addDecodeRequest(t, e, 32, 1, blocks(2, 2), now)
	step := e.Step(now)
	if want := []*Request{first, second}; !slices.Equal(step.Transferring, want) || step.Prefilled != 0 || step.Decoded != 1 {
		t.Fatalf("%d transfers, %d tokens computed, %d decoded; want both transfers beside a decode", len(step.Transferring), step.Prefilled,
			step.Decoded)
	}
	if first.TransferEnd != now+40*time.Millisecond || second.TransferEnd != now+60*time.Millisecond {
		t.Errorf("transfers end after %v and %v, want 40 ms and 60 ms", first.TransferEnd-now, second.TransferEnd-now)
	}
	if st := e.Stats(); st.Loading != 2 || st.Waiting != 2 || st.Running != 1 || st.KVUsage != 0.6 {
		t.Errorf("%+v, want two requests that load and have their blocks", st)
	}
	now = runTransfers(t, e, busy, TransferDone, step.End) // EndTransfer is not called
	if first.FirstToken != 0 {
		t.Error("computed before its transfer ended")
	}
	e.EndTransfer(second, TransferDone)
	e.Abort(first)
	finish(t, e, second, now)
	if st := e.Stats(); st.KVUsage != 0 {
		t.Errorf("usage %v in the end, want 0", st.KVUsage)
	}
}

// TestTransferWaitsForRoom adds a request whose prompt fits into the cache only when another one has ended.
func TestTransferWaitsForRoom(t *testing.T) {
	e := newEngine(transferConfig())
	busy := add(t, e, 100, 10, nil, 0)
	now := e.Step(0).End
	r := addDecodeRequest(t, e, 80, 1, nil, now)
	end := runTransfers(t, e, r, TransferDone, now)
	if r.Started < busy.Finished || r.TransferEnd != r.Started+70*time.Millisecond || end < r.TransferEnd {
		t.Errorf("admitted at %v, transferred until %v; the other ended at %v", r.Started, r.TransferEnd, busy.Finished)
	}
}

// TestTransferIsNotPreempted fills the cache with a decode beside a transfer: the decode preempts itself. A request that
// is preempted after its transfer computes what the cache has lost.
func TestTransferIsNotPreempted(t *testing.T) {
	e := newEngine(transferConfig())
	busy := add(t, e, 79, 40, nil, 0)
	now := e.Step(0).End
	r := addDecodeRequest(t, e, 70, 60, blocks(1, 4), now)
	for busy.Preempted == 0 {
		now = e.Step(now).End
	}
	if st := e.Stats(); st.Loading != 1 || st.Running != 0 || st.Waiting != 2 {
		t.Fatalf("%+v, want a request that loads, and the other preempted", st)
	}
	e.EndTransfer(r, TransferDone)
	now = e.Step(now).End
	e.preempt(r, now)
	finish(t, e, r, now)
	if r.Transferred != 70 || e.Stats().RemoteHits != 70 {
		t.Errorf("%d tokens transferred, %d counted; want 70, once", r.Transferred, e.Stats().RemoteHits)
	}
}

func TestDiscardCacheDuringTransfer(t *testing.T) {
	e := newEngine(transferConfig())
	r := addDecodeRequest(t, e, 70, 1, blocks(1, 4), 0)
	now := e.Step(0).End
	e.DiscardCache(now)
	e.EndTransfer(r, TransferCorrupt) // no effect
	finish(t, e, r, now)
	if r.Transferred != 0 || r.Corrupt {
		t.Errorf("%d tokens transferred, corrupt %v; want the prompt computed", r.Transferred, r.Corrupt)
	}
}

// TestCorruptBlocks follows corrupt blocks through the cache: what is computed on top of them is corrupt, until they are
// evicted or the cache is reset.
func TestCorruptBlocks(t *testing.T) {
	for _, c := range []struct {
		name    string
		act     func(t *testing.T, e *Engine, now time.Duration) time.Duration
		corrupt bool
	}{
		{"kept", func(_ *testing.T, _ *Engine, now time.Duration) time.Duration { return now }, true},
		{"cache reset", func(_ *testing.T, e *Engine, now time.Duration) time.Duration { e.ResetPrefixCache(); return now }, false},
		{"evicted", func(t *testing.T, e *Engine, now time.Duration) time.Duration {
			return finish(t, e, add(t, e, 159, 1, blocks(3, 9), now), now)
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(transferConfig())
			now := runTransfers(t, e, addDecodeRequest(t, e, 32, 1, blocks(1, 2), 0), TransferCorrupt, 0)
			longer := add(t, e, 70, 1, blocks(1, 4), now)
			now = finish(t, e, longer, now)
			other := add(t, e, 33, 1, blocks(2, 2), now)
			now = finish(t, e, other, now)
			if !longer.Corrupt || other.Corrupt {
				t.Errorf("corrupt: longer prompt %v, another one %v; want only the longer one", longer.Corrupt, other.Corrupt)
			}
			now = c.act(t, e, now)
			again := add(t, e, 70, 1, blocks(1, 4), now)
			finish(t, e, again, now)
			if again.Corrupt != c.corrupt {
				t.Errorf("corrupt %v, want %v", again.Corrupt, c.corrupt)
			}
		})
	}
}
