package policy

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestWeighted(t *testing.T) {
	f := func(why string, want int, a, b Candidate) {
		t.Helper()
		p := newRival(t, "weighted", Settings{})
		p.send(about("abcd"), 0)
		p.expect(why, about("abcde"), fleet(a, b), want)
	}
	// 3·0.8 + 2·0.1 + 2·0 = 2.6 against 0 + 2·0.9 + 2·1 = 3.8
	f("the longest queue and little KV", 1, Candidate{KVUsage: 0.9, Waiting: 1}, Candidate{KVUsage: 0.1})
	// 3·0.8 + 2·0.1 + 2·1 = 4.6 against 0 + 2·0.9 + 2·1 = 3.8. Pathology: any
	// queue is as good as none when all are equal.
	f("equal queues", 0, Candidate{KVUsage: 0.9, Waiting: 9}, Candidate{KVUsage: 0.1, Waiting: 9})
	// Pathology: what was sent since the last poll does not count.
	f("a thousand in flight", 0, Candidate{Requests: 1000, UnstartedTokens: 1e6}, Candidate{})
	p := newRival(t, "weighted", Settings{})
	p.expect("all equal", about(""), idle(3), 0, 1, 2)
}

func TestEPPCreditsWhatIsLeftOfABeheadedPrefix(t *testing.T) {
	p := newRival(t, "weighted", Settings{})
	small := idle(1)
	small[0].CacheTokens = 4 * 64 // four blocks: c, d, e and f stay
	r := about("abcdef")
	p.Choose(&r, small)
	// Nobody holds the first block, so nobody is credited with anything.
	p.expect("nobody holds the head", about("abcdef"), fleet(Candidate{KVUsage: 0.1}, Candidate{}), 1)
	p = newRival(t, "weighted", Settings{})
	p.Choose(&r, small)
	p.send(about("ab"), 1)
	// 3·4/6 = 2, though a replica could use none of it, against 3·2/6 = 1.
	p.expect("somebody else does", about("abcdef"), idle(2), 0)
}

func TestEPPTableBounds(t *testing.T) {
	p := newRival(t, "weighted", Settings{})
	// 31,250 blocks of 64 tokens are 4 blocks of 500,000, and a prompt's part that
	// is looked at, 131,072 tokens, is one.
	large := func(s string) Request {
		r := about(s)
		r.BlockTokens, r.PromptTokens = 500_000, float64(500_000*len(s))
		return r
	}
	for _, s := range []string{"a1", "b2", "c3", "d4", "e5"} {
		p.send(large(s), 0)
	}
	busier := func() []Candidate { return fleet(Candidate{KVUsage: 0.5}, Candidate{}) }
	p.expect("b is the fourth last", large("bxyz"), busier(), 0) // 3·1 + 1 against 2
	p.expect("a is the fifth", large("a"), busier(), 1)
}

func TestLLMDGuide(t *testing.T) {
	f := func(why string, want int, held string, candidates ...Candidate) {
		t.Helper()
		p := newRival(t, "llmd-guide", Settings{})
		p.send(about(held), 0)
		p.send(about(held), 1)
		p.expect(why, about("abcdefghij"), fleet(candidates...), want)
	}
	// 280,000 / 15,928 = 17.6 s. Pathology: up to 18 s of queue for any match.
	f("8 of 10 are 0.8", 0, "abcdefgh", Candidate{UnstartedTokens: 280_000}, Candidate{UnstartedTokens: 290_000}, Candidate{})
	// 290,000 / 15,928 = 18.2 s
	f("the better holder's queue is 18 s longer", 2, "abcdefgh", Candidate{UnstartedTokens: 290_000}, Candidate{UnstartedTokens: 300_000}, Candidate{})
	f("7 of 10 are not enough", 2, "abcdefg", Candidate{UnstartedTokens: 2}, Candidate{UnstartedTokens: 3}, Candidate{UnstartedTokens: 1})
	f("the shorter queue of the holders", 1, "abcdefgh", Candidate{UnstartedTokens: 2}, Candidate{UnstartedTokens: 1}, Candidate{})
	f("all hold it", 1, "abcdefgh", Candidate{UnstartedTokens: 1e6}, Candidate{UnstartedTokens: 1})
}

func TestAIBrix(t *testing.T) {
	f := func(why string, candidates []Candidate, want ...int) {
		t.Helper()
		p := newRival(t, "aibrix", Settings{})
		p.send(about("abcdefghi"), 0)
		p.send(about("abcde"), 1)
		p.expect(why, about("abcdefghij"), candidates, want...)
	}
	f("the longest match", busy(3, 3, 3, 3), 0)
	// mean 3, deviation √(2/4) = 0.71
	f("4 > 3.71: the next", busy(4, 2, 3, 3), 1)
	// mean 4, deviation √(32/4) = 2.83
	f("both above 6.83: the least loaded", busy(8, 8, 0, 1, 3), 2)
	// Pathology: nine requests switch affinity off, mean 9/4.
	f("9 - 0 > 8: only the least loaded", busy(0, 9, 0, 1), 0)
	f("… whoever holds it", busy(1, 9, 0, 1), 2)
	p := newRival(t, "aibrix", Settings{ImbalanceAbs: 1})
	p.send(about("abcde"), 0)
	p.expect("2 - 0 > 1", about("abcde"), busy(2, 0), 1)
}

func TestAIBrixTellsNoScoreOfWhoIsPassedOver(t *testing.T) {
	f := func(candidates []Candidate, want ...float64) {
		t.Helper()
		p := newRival(t, "aibrix", Settings{})
		p.send(about("abcdefghi"), 0)
		p.send(about("abcde"), 1)
		var trial Trace
		r := about("abcdefghij")
		r.Trace = &trial
		p.Choose(&r, candidates)
		if !slices.Equal(trial.Scores, want) {
			t.Errorf("scores %v, want %v", trial.Scores, want)
		}
	}
	none := math.Inf(-1)
	f(busy(3, 3, 3, 3), 9, 5, 0, 0)
	f(busy(4, 2, 3, 3), none, 5, 0, 0)    // above the mean and a deviation
	f(busy(0, 9, 0, 1), 9, none, 0, none) // not the least loaded
}

func TestAIBrixGoesByWholePercents(t *testing.T) {
	p := newRival(t, "aibrix", Settings{})
	long := make([]byte, 250)
	for i := range long {
		long[i] = byte(i)
	}
	p.send(about(string(long[:201])), 0)
	p.send(about(string(long[:200])), 1)
	// 80.4 % and 80.0 % are 80 both; in flight decides.
	p.expect("201 and 200 of 250", about(string(long)), busy(1, 0), 1)
}

func TestAIBrixTableForgets(t *testing.T) {
	at := func(s string, after time.Duration) Request {
		r := about(s)
		r.Now = dawn.Add(after)
		return r
	}
	p := newRival(t, "aibrix", Settings{})
	p.send(at("abc", 0), 0)
	p.expect("after 20 minutes", at("abcd", 20*time.Minute), busy(1, 1, 1), 0)
	p = newRival(t, "aibrix", Settings{})
	p.send(at("abc", 0), 0)
	p.expect("and a moment", at("abcd", 20*time.Minute+1), busy(1, 0), 1)

	p = newRival(t, "aibrix", Settings{})
	// 200,000 blocks of 16 tokens are 4 blocks of 800,000, the fleet's in all.
	large := func(s string) Request {
		r := about(s)
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
	p := newRival(t, "preble", Settings{})
	p.send(about("abcdef"), 0)
	p.send(about("k"), 1)
	// Pathology: how much is queued does not matter.
	p.expect("6 of 10 is more than half", about("abcdefghij"), fleet(Candidate{Requests: 99, UnstartedTokens: 1e6}, Candidate{}), 0)
	p = newRival(t, "preble", Settings{})
	p.send(about("abcdefghijklmno"), 0)
	p.send(about("12345"), 1)
	// 15·64 + 5·64 against 5·64 + 10·64
	p.expect("5 of 10 is not: what was placed lately, and this", about("abcde56789"), busy(0, 0), 1)
	p = newRival(t, "preble", Settings{})
	p.send(about("abcde"), 0)
	p.send(about("123456"), 1)
	// 5·64 + 5·64 against 6·64 + 10·64
	p.expect("its own uncached tokens count as well", about("abcde56789"), busy(0, 0), 0)
}

func TestPrebleForgetsWhatWasPlacedThreeMinutesAgo(t *testing.T) {
	p := newRival(t, "preble", Settings{})
	at := func(s string, after time.Duration) Request {
		r := about(s)
		r.Now = dawn.Add(after)
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
	p := newRival(t, "lmetric", Settings{})
	hit := func(n float64) Candidate { return Candidate{UncachedTokens: 64, InFlight: n} }
	cold := Candidate{UncachedTokens: 640}
	p.expect("64 × (8+1) = 576 < 640", Request{}, fleet(hit(8), cold), 0)
	p.expect("64 × (10+1) = 704 > 640", Request{}, fleet(hit(10), cold), 1)
	p.expect("64 × (9+1) = 640", Request{}, fleet(hit(9), cold), 0, 1)
	p.expect("(600+64) × 1 > 640", Request{}, fleet(Candidate{UncachedTokens: 64, UnstartedTokens: 600}, cold), 1)
}

func TestSMetric(t *testing.T) {
	// A prompt of 4,000 tokens is to have its first token within 1 + 2·4,000/8,000
	// = 2 s: 16,000 tokens at 8,000 a second.
	r := Request{PromptTokens: 4000}
	f := func(why string, want int, candidates ...Candidate) {
		t.Helper()
		newRival(t, "smetric", Settings{}).expect(why, r, fleet(candidates...), want)
	}
	home := func(unstarted float64) Candidate {
		return Candidate{MatchedTokens: 3000, UncachedTokens: 1000, UnstartedTokens: unstarted, InFlight: 9}
	}
	cold := func(unstarted, n float64) Candidate {
		return Candidate{UncachedTokens: 4000, UnstartedTokens: unstarted, InFlight: n}
	}
	f("15,000 + 1,000 is in time", 0, home(15_000), cold(0, 0))
	// 16,001 × 9 against 4,000 × 1
	f("a token more is not", 1, home(15_001), cold(0, 1))
	f("… and nobody else is", 0, home(15_001), cold(12_001, 1))
	// 16,001 × 9 against 15,000 × 10
	f("the lower product is at home all the same", 0, home(15_001), cold(11_000, 10))
	f("1,000 of 4,000 is not more than a quarter", 1,
		Candidate{MatchedTokens: 1000, UncachedTokens: 3000, InFlight: 2}, cold(0, 1))
	// 16,000 tokens at 4,000 a second; 4,001 × 1 against 16,000 × 9
	slow := home(15_000)
	slow.PrefillRate = 4000
	f("a slow backend", 1, slow, cold(1, 1))

	holds := func(unstarted, n float64) Candidate {
		return Candidate{MatchedTokens: 3000, UncachedTokens: 1000, UnstartedTokens: unstarted, InFlight: n}
	}
	f("of equal matches the one with the least queued", 2, holds(2000, 1), holds(1000, 1), holds(0, 9), cold(0, 0))
	f("then with the fewest in flight", 1, holds(1000, 3), holds(1000, 2), holds(1000, 4))
	newRival(t, "smetric", Settings{}).expect("then any", r, fleet(holds(0, 1), holds(0, 2), holds(0, 1), holds(0, 1)), 0, 2, 3)
}
