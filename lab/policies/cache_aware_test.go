package policies

import (
	"math"
	"slices"
	"testing"
	"time"

	"warmroute/router/policy"
)

func TestCacheThreshold(t *testing.T) {
	f := func(why string, s policy.Settings, held string, candidates []policy.Candidate, want ...int) {
		t.Helper()
		p := newTester(t, "cache-threshold", s)
		p.send(requestFor(held), 0)
		p.expect(why, requestFor("abcdefghij"), candidates, want...)
	}
	f("4 of 10 is more than 0.3", policy.Settings{}, "abcd", busy(1, 0, 0), 0)
	f("3 of 10 is not", policy.Settings{}, "abc", busy(1, 0, 1), 1)
	f("3 of 10 is more than a ratio of 0.25", policy.Settings{MatchRatio: 0.25}, "abc", busy(1, 0, 1), 0)
	// Pathology: up to the gate a match outweighs any queue.
	f("64 more in flight", policy.Settings{}, "abcd", busy(64, 0, 1), 0)
	f("65 more: 65 - 0 > 64, 65 > 1.5 × 0", policy.Settings{}, "abcd", busy(65, 0, 1), 1)
	f("300 - 210 > 64, but 300 < 1.5 × 210", policy.Settings{}, "abcd", busy(300, 210, 210), 0)
	f("… more than 1.2 × 210", policy.Settings{ImbalanceRatio: 1.2}, "abcd", busy(300, 210, 211), 1)
	f("10 more, and a gate of 9", policy.Settings{ImbalanceAbs: 9}, "abcd", busy(10, 0, 1), 1)
	// Pathology: one hot backend takes the affinity of all away.
	f("a third backend is hot", policy.Settings{}, "abcdefghij", busy(1, 80, 0), 2)
}

// TestMatchTokens sends the whole prompt again: each policy with a ratio chooses the backend that has it only where the
// prompt has match_tokens tokens.
func TestMatchTokens(t *testing.T) {
	for _, definition := range All().All() {
		if !definition.Reads("routing.match_tokens") {
			continue
		}
		choose := func(matchTokens int, r policy.Request) int {
			p := newTester(t, definition.Name, policy.Settings{MatchTokens: matchTokens})
			p.send(r, 0)
			p.send(requestFor("z"), 2)
			candidates := busy(1, 0, 1)
			for i := range candidates {
				candidates[i].UncachedTokens, candidates[i].UnstartedTokens = r.PromptTokens, 64*candidates[i].Requests
			}
			candidates[0].MatchedTokens, candidates[0].UncachedTokens = r.PromptTokens, 0 // as our index has it
			return p.Choose(&r, candidates)
		}
		for prompt, want := range map[string][3]int{"abcd": {0, 0, 1}, "abc": {0, 1, 1}} {
			for i, matchTokens := range []int{0, 256, 257} {
				if got := choose(matchTokens, requestFor(prompt)); got != want[i] {
					t.Errorf("%s: %d tokens of a prompt that backend 0 has whole, at a minimum of %d: went to backend %d, want %d",
						definition.Name, 64*len(prompt), matchTokens, got, want[i])
				}
			}
		}
	}
}

func TestCacheThresholdRecordsMatchedBusy(t *testing.T) {
	p := newTester(t, "cache-threshold", policy.Settings{})
	p.send(requestFor("abcd"), 0)
	p.expect("imbalanced", requestFor("abcd"), busy(65, 0, 1), 1)
	p.expect("both hold it now", requestFor("abcd"), busy(64, 1, 0), 0, 1)
}

func TestCacheThresholdOld(t *testing.T) {
	f := func(why string, want int, held string, candidates []policy.Candidate) {
		t.Helper()
		p := newTester(t, "cache-threshold-old", policy.Settings{})
		p.send(requestFor("12345678"), 0)
		p.send(requestFor(held), 0)
		p.send(requestFor("qrs"), 1)
		p.send(requestFor("tuvwx"), 2)
		p.expect(why, requestFor("abcdefghij"), candidates, want)
	}
	f("6 of 10 is more than 0.5", 0, "abcdef", busy(30, 0, 0))
	// Trees of 13, 3 and 5 blocks. Pathology: 30 in flight do not count.
	f("5 of 10 is not: the smallest tree", 1, "abcde", busy(0, 30, 0))
	// 33 > 32, 100 × 1.1 = 110 < 133
	f("33 more in flight", 2, "abcdef", busy(133, 101, 100))
	// 33 > 32, but 1000 × 1.1 > 1033
	f("… of a thousand", 0, "abcdef", busy(1033, 1000, 1000))
}

func TestSMG(t *testing.T) {
	f := func(why string, holders int, candidates []policy.Candidate, want ...int) {
		t.Helper()
		p := newTester(t, "smg", policy.Settings{})
		for slot := range holders {
			p.send(requestFor("abcd"), slot)
		}
		p.expect(why, requestFor("abcdefghij"), candidates, want...)
	}
	f("4 of 10 is more than 0.3", 1, busy(5, 0, 1), 0)
	f("a hot backend that holds nothing has no effect", 1, busy(10, 200, 0), 0)
	// mean 100/3 = 33.3: 100 > 50 and 100 > 97.3
	f("the holder is hot", 1, busy(100, 0, 1), 1)
	// mean 95/3 = 31.7: 95 > 47.5 but 95 < 95.7
	f("the holder is all but hot", 1, busy(95, 0, 0), 0)
	f("the least loaded of those that hold it", 3, busy(5, 3, 4, 0), 1)
	// mean 102/4 = 25.5: 102 > 89.5
	f("the hot one of two is left out", 2, busy(102, 0, 0, 0), 1)
	// The ninth, idle, is not looked at.
	f("among eight at most", 9, busy(5, 5, 5, 5, 5, 5, 4, 5, 0), 6)
	p := newTester(t, "smg", policy.Settings{})
	p.send(requestFor("abc"), 0)
	p.expect("3 of 10 is not more than 0.3", requestFor("abcdefghij"), busy(1, 0), 1)
}

func TestHashTrie(t *testing.T) {
	p := newTester(t, "hashtrie", policy.Settings{})
	p.send(requestFor("a"), 0)
	// Pathology: a shared first block brings everything to one backend.
	p.expect("1 of 10, and a thousand in flight", requestFor("abcdefghij"), busy(1000, 0), 0)
	seen := map[int]bool{}
	for unknown := range 20 {
		r := requestFor(string(rune('A' + unknown)))
		seen[chooseAndRecord(p, &r, busy(1000, 0))] = true
	}
	if len(seen) != 2 {
		t.Errorf("twenty unknown prompts went to %v of two backends, one of them full", seen)
	}
	p.send(requestFor("abc"), 1)
	p.expect("3 of 4 against all of them", requestFor("abcd"), busy(0, 0), 0)
}

func TestRay(t *testing.T) {
	p := newTester(t, "ray", policy.Settings{})
	p.send(requestFor("a"), 0)
	p.send(requestFor("12345"), 0)
	p.send(requestFor("qr"), 1)
	// 1 of 10 is 0.1; 10 more in flight are not more than 10.
	p.expect("a tenth is enough", requestFor("abcdefghij"), busy(10, 0), 0)
	p = newTester(t, "ray", policy.Settings{})
	p.send(requestFor("a"), 0)
	p.send(requestFor("qr"), 1)
	p.send(requestFor("stu"), 2)
	p.expect("1 of 11 is not: the smallest tree", requestFor("abcdefghijk"), busy(9, 1, 0), 0)
	p.expect("11 more in flight: the less loaded of two", requestFor("qr"), busy(0, 11), 0)
	p.expect("no text: the same", policy.Request{Now: epoch}, busy(1, 3), 0)
}

func TestRayEviction(t *testing.T) {
	f := func(why string, s policy.Settings, after time.Duration, want ...int) {
		t.Helper()
		s.MatchRatio = 0.5
		p := newTester(t, "ray", s)
		at := func(prompt string, after time.Duration) policy.Request { // blocks of 40,000 characters
			r := requestFor(prompt)
			r.BlockTokens, r.PromptTokens, r.Now = 10_000, float64(10_000*len(prompt)), epoch.Add(after)
			return r
		}
		p.send(at("old", 0), 0)
		p.send(at("abcdefgh", time.Second), 0)
		p.send(at("z", after), 1)
		p.expect(why, at("old", after), busy(1, 0), want...)
	}
	// The backend has 11 blocks. Where "old" is evicted, the other one has the smaller tree.
	f("none by default", policy.Settings{}, time.Hour, 0)
	f("more than 400,000 characters", policy.Settings{EvictionThreshold: 400_000}, 10*time.Second, 1)
	f("not yet", policy.Settings{EvictionThreshold: 400_000}, 9*time.Second, 0)
	f("sooner", policy.Settings{EvictionThreshold: 400_000, EvictionInterval: 5 * time.Second}, 5*time.Second, 1)
	f("not more than 440,000", policy.Settings{EvictionThreshold: 440_000}, time.Hour, 0)
	f("that many below the threshold", policy.Settings{EvictionThreshold: 500_000}, time.Hour, 0)
}

// TestRayEvictionTarget counts the blocks that are left of six prompts with two blocks of 1,024 characters each.
func TestRayEvictionTarget(t *testing.T) {
	for target, want := range map[int]int{0: 8 /* 9 is nine tenths */, 10_240: 10, 5120: 4, 4096: 4} {
		p := newTester(t, "ray", policy.Settings{EvictionThreshold: 10_240, EvictionTarget: target})
		for i, prompt := range []string{"ab", "cd", "ef", "gh", "ij", "kl"} {
			r := requestFor(prompt)
			r.BlockTokens, r.PromptTokens, r.Now = 256, 512, epoch.Add(time.Duration(2*i)*time.Second)
			p.send(r, 0)
		}
		if got := p.Policy.(*rayAffinity).blockCount(0); got != want {
			t.Errorf("at a target of %d characters %d blocks are left, want %d: whole prompts are evicted", target, got, want)
		}
	}
}

func TestDynamo(t *testing.T) {
	f := func(why string, want int, after time.Duration, a, b policy.Candidate) {
		t.Helper()
		p := newTester(t, "dynamo", policy.Settings{})
		p.send(requestFor("abcdefgh"), 0)
		r := requestFor("abcdefghij")
		r.Now = epoch.Add(after)
		p.expect(why, r, fleet(a, b), want)
	}
	f("640 - 512 against 640 tokens", 0, 0, policy.Candidate{}, policy.Candidate{})
	f("600 + 128 against 640", 1, 0, policy.Candidate{UnstartedTokens: 600}, policy.Candidate{})
	// Pathology: 600 tokens of context weigh as much as 600 of prefill.
	f("the same in decode", 1, 0, policy.Candidate{KVTokens: 600}, policy.Candidate{})
	f("500 + 128 against 640", 0, 0, policy.Candidate{KVTokens: 500}, policy.Candidate{})
	f("after 120 s it is still there", 0, 120*time.Second, policy.Candidate{UnstartedTokens: 1}, policy.Candidate{})
	f("… and then no longer", 1, 120*time.Second+1, policy.Candidate{UnstartedTokens: 1}, policy.Candidate{})
}

func TestWeighted(t *testing.T) {
	f := func(why string, want int, a, b policy.Candidate) {
		t.Helper()
		p := newTester(t, "weighted", policy.Settings{})
		p.send(requestFor("abcd"), 0)
		p.expect(why, requestFor("abcde"), fleet(a, b), want)
	}
	// 3·0.8 + 2·0.1 + 2·0 = 2.6 against 0 + 2·0.9 + 2·1 = 3.8
	f("the longest queue and little KV", 1, policy.Candidate{KVUsage: 0.9, Waiting: 1}, policy.Candidate{KVUsage: 0.1})
	// 3·0.8 + 2·0.1 + 2·1 = 4.6 against 0 + 2·0.9 + 2·1 = 3.8. Pathology: any
	// queue is as good as none when all are equal.
	f("equal queues", 0, policy.Candidate{KVUsage: 0.9, Waiting: 9}, policy.Candidate{KVUsage: 0.1, Waiting: 9})
	// Pathology: what was sent since the last poll does not count.
	f("a thousand in flight", 0, policy.Candidate{Requests: 1000, UnstartedTokens: 1e6}, policy.Candidate{})
	p := newTester(t, "weighted", policy.Settings{})
	p.expect("all equal", requestFor(""), idle(3), 0, 1, 2)
}

func TestLLMDGuide(t *testing.T) {
	f := func(why string, want int, held string, candidates ...policy.Candidate) {
		t.Helper()
		p := newTester(t, "llmd-guide", policy.Settings{})
		p.send(requestFor(held), 0)
		p.send(requestFor(held), 1)
		p.expect(why, requestFor("abcdefghij"), fleet(candidates...), want)
	}
	// 280,000 / 15,928 = 17.6 s. Pathology: up to 18 s of queue for any match.
	f("8 of 10 are 0.8", 0, "abcdefgh", policy.Candidate{UnstartedTokens: 280_000}, policy.Candidate{UnstartedTokens: 290_000},
		policy.Candidate{})
	// 290,000 / 15,928 = 18.2 s
	f("the better holder's queue is 18 s longer", 2, "abcdefgh", policy.Candidate{UnstartedTokens: 290_000},
		policy.Candidate{UnstartedTokens: 300_000}, policy.Candidate{})
	f("7 of 10 are not enough", 2, "abcdefg", policy.Candidate{UnstartedTokens: 2}, policy.Candidate{UnstartedTokens: 3},
		policy.Candidate{UnstartedTokens: 1})
	f("the shorter queue of the holders", 1, "abcdefgh", policy.Candidate{UnstartedTokens: 2}, policy.Candidate{UnstartedTokens: 1},
		policy.Candidate{})
	f("all hold it", 1, "abcdefgh", policy.Candidate{UnstartedTokens: 1e6}, policy.Candidate{UnstartedTokens: 1})
}

func TestAIBrix(t *testing.T) {
	f := func(why string, candidates []policy.Candidate, want ...int) {
		t.Helper()
		p := newTester(t, "aibrix", policy.Settings{})
		p.send(requestFor("abcdefghi"), 0)
		p.send(requestFor("abcde"), 1)
		p.expect(why, requestFor("abcdefghij"), candidates, want...)
	}
	f("the longest match", busy(3, 3, 3, 3), 0)
	// mean 3, deviation √(2/4) = 0.71
	f("4 > 3.71: the next", busy(4, 2, 3, 3), 1)
	// mean 4, deviation √(32/4) = 2.83
	f("both above 6.83: the least loaded", busy(8, 8, 0, 1, 3), 2)
	// Pathology: nine requests switch affinity off, mean 9/4.
	f("9 - 0 > 8: only the least loaded", busy(0, 9, 0, 1), 0)
	f("… regardless of the match", busy(1, 9, 0, 1), 2)
	p := newTester(t, "aibrix", policy.Settings{ImbalanceAbs: 1})
	p.send(requestFor("abcde"), 0)
	p.expect("2 - 0 > 1", requestFor("abcde"), busy(2, 0), 1)
}

func TestAIBrixTraceScores(t *testing.T) {
	f := func(candidates []policy.Candidate, want ...float64) {
		t.Helper()
		p := newTester(t, "aibrix", policy.Settings{})
		p.send(requestFor("abcdefghi"), 0)
		p.send(requestFor("abcde"), 1)
		var trace policy.Trace
		r := requestFor("abcdefghij")
		r.Trace = &trace
		p.Choose(&r, candidates)
		if !slices.Equal(trace.Scores, want) {
			t.Errorf("scores %v, want %v", trace.Scores, want)
		}
	}
	none := math.Inf(-1)
	f(busy(3, 3, 3, 3), 9, 5, 0, 0)
	f(busy(4, 2, 3, 3), none, 5, 0, 0)    // above the mean and a deviation
	f(busy(0, 9, 0, 1), 9, none, 0, none) // not the least loaded
}

func TestAIBrixWholePercents(t *testing.T) {
	p := newTester(t, "aibrix", policy.Settings{})
	long := make([]byte, 250)
	for i := range long {
		long[i] = byte(i)
	}
	p.send(requestFor(string(long[:201])), 0)
	p.send(requestFor(string(long[:200])), 1)
	// 80.4 % and 80.0 % are 80 both; in flight decides.
	p.expect("201 and 200 of 250", requestFor(string(long)), busy(1, 0), 1)
}

func TestAIBrixTableBounds(t *testing.T) {
	at := func(s string, after time.Duration) policy.Request {
		r := requestFor(s)
		r.Now = epoch.Add(after)
		return r
	}
	p := newTester(t, "aibrix", policy.Settings{})
	p.send(at("abc", 0), 0)
	p.expect("after 20 minutes", at("abcd", 20*time.Minute), busy(1, 1, 1), 0)
	p = newTester(t, "aibrix", policy.Settings{})
	p.send(at("abc", 0), 0)
	p.expect("and a moment", at("abcd", 20*time.Minute+1), busy(1, 0), 1)

	p = newTester(t, "aibrix", policy.Settings{})
	// 200,000 blocks of 16 tokens are 4 blocks of 800,000, the fleet's in all.
	large := func(s string) policy.Request {
		r := requestFor(s)
		r.BlockTokens, r.PromptTokens = 800_000, float64(800_000*len(s))
		return r
	}
	p.send(large("abcd"), 0)
	p.expect("4 blocks", large("abcd"), busy(1, 1), 0)
	p.send(large("x"), 1)
	// Pathology: the head went first, and b, c and d are of no use.
	p.expect("one more block", large("abcd"), busy(1, 0), 1)
}

func TestPreble(t *testing.T) {
	p := newTester(t, "preble", policy.Settings{})
	p.send(requestFor("abcdef"), 0)
	p.send(requestFor("k"), 1)
	// Pathology: how much is queued does not matter.
	p.expect("6 of 10 is more than half", requestFor("abcdefghij"), fleet(policy.Candidate{Requests: 99, UnstartedTokens: 1e6},
		policy.Candidate{}), 0)
	p = newTester(t, "preble", policy.Settings{})
	p.send(requestFor("abcdefghijklmno"), 0)
	p.send(requestFor("12345"), 1)
	// 15·64 + 5·64 against 5·64 + 10·64
	p.expect("5 of 10 is not: what was placed lately, and this", requestFor("abcde56789"), busy(0, 0), 1)
	p = newTester(t, "preble", policy.Settings{})
	p.send(requestFor("abcde"), 0)
	p.send(requestFor("123456"), 1)
	// 5·64 + 5·64 against 6·64 + 10·64
	p.expect("its own uncached tokens count as well", requestFor("abcde56789"), busy(0, 0), 0)
}

func TestPrebleWindow(t *testing.T) {
	p := newTester(t, "preble", policy.Settings{})
	at := func(s string, after time.Duration) policy.Request {
		r := requestFor(s)
		r.Now = epoch.Add(after)
		return r
	}
	p.send(at("ab", 0), 0)
	p.send(at("ab", 0), 0)
	p.send(at("ab", 100*time.Second), 1)
	p.expect("both hold it: one request against two", at("ab", 100*time.Second), busy(0, 0), 1)
	// Now two each, of which those on 0 are three minutes old.
	p.expect("none against two", at("ab", 180*time.Second), busy(0, 0), 0)
	// One on 0 (at 180 s); those on 1 have gone at 280 s.
	p.expect("one against none", at("ab", 280*time.Second), busy(0, 0), 1)
	p.expect("long ago", at("ab", time.Hour), busy(0, 0), 0, 1)
}

func TestLMetric(t *testing.T) {
	p := newTester(t, "lmetric", policy.Settings{})
	hit := func(n float64) policy.Candidate { return policy.Candidate{UncachedTokens: 64, InFlight: n} }
	cold := policy.Candidate{UncachedTokens: 640}
	p.expect("64 × (8+1) = 576 < 640", policy.Request{}, fleet(hit(8), cold), 0)
	p.expect("64 × (10+1) = 704 > 640", policy.Request{}, fleet(hit(10), cold), 1)
	p.expect("64 × (9+1) = 640", policy.Request{}, fleet(hit(9), cold), 0, 1)
	p.expect("(600+64) × 1 > 640", policy.Request{}, fleet(policy.Candidate{UncachedTokens: 64, UnstartedTokens: 600}, cold), 1)
}

func TestSMetric(t *testing.T) {
	// A prompt of 4,000 tokens is to have its first token within 1 + 2·4,000/8,000
	// = 2 s: 16,000 tokens at 8,000 a second. The last 1,000 of them are as much work as 1,114.2, because
	// they attend to 1,000 · 3,500 tokens, and all of them as 4,261.2.
	r := policy.Request{PromptTokens: 4000}
	f := func(why string, want int, candidates ...policy.Candidate) {
		t.Helper()
		newTester(t, "smetric", policy.Settings{}).expect(why, r, fleet(candidates...), want)
	}
	first := func(unstarted float64) policy.Candidate {
		return policy.Candidate{MatchedTokens: 3000, UncachedTokens: 1000, UnstartedTokens: unstarted, InFlight: 9}
	}
	cold := func(unstarted, n float64) policy.Candidate {
		return policy.Candidate{UncachedTokens: 4000, UnstartedTokens: unstarted, InFlight: n}
	}
	f("14,885 + 1,114.2 is in time", 0, first(14_885), cold(0, 0))
	// 16,000.2 × 9 against 4,261.2 × 1
	f("a token more is not", 1, first(14_886), cold(0, 1))
	f("… and no other is", 0, first(14_886), cold(11_739, 1))
	// 16,000.2 × 9 against 15,261.2 × 10
	f("the lower product is at first all the same", 0, first(14_886), cold(11_000, 10))
	f("1,000 of 4,000 is not more than a quarter", 1,
		policy.Candidate{MatchedTokens: 1000, UncachedTokens: 3000, InFlight: 2}, cold(0, 1))
	// 15,999.2 tokens at 4,000 a second; 4,262.2 × 1 against 15,999.2 × 9
	slow := first(14_885)
	slow.PrefillRate = 4000
	f("a slow backend", 1, slow, cold(1, 1))

	// Requests without a first event attend to 4 · 10⁷ tokens: as much work as 1,306 tokens.
	attending := first(14_885)
	attending.UnstartedAttention = 4e7
	f("what is queued attends to tokens as well", 1, attending, cold(0, 1))
	// 2,500 × 1 and 3.4 tokens of attention against 2,000 × 1 and 522
	long, short := policy.Candidate{UnstartedTokens: 2000, UnstartedAttention: 1.6e7, InFlight: 1},
		policy.Candidate{UnstartedTokens: 2500, UnstartedAttention: 1e5, InFlight: 1}
	f("less work in more tokens", 1, long, short)
	newTester(t, "smetric", policy.Settings{AttentionCost: -1}).expect("no attention: fewer tokens", r, fleet(long, short), 0)

	holds := func(unstarted, n float64) policy.Candidate {
		return policy.Candidate{MatchedTokens: 3000, UncachedTokens: 1000, UnstartedTokens: unstarted, InFlight: n}
	}
	f("of equal matches the one with the least queued", 2, holds(2000, 1), holds(1000, 1), holds(0, 9), cold(0, 0))
	f("then with the fewest in flight", 1, holds(1000, 3), holds(1000, 2), holds(1000, 4))
	newTester(t, "smetric", policy.Settings{}).expect("then any", r, fleet(holds(0, 1), holds(0, 2), holds(0, 1), holds(0, 1)), 0, 2, 3)
}
