package policy

import (
	"testing"
	"time"
)

func TestCacheThreshold(t *testing.T) {
	f := func(why string, s Settings, held string, candidates []Candidate, want ...int) {
		t.Helper()
		p := newRival(t, "cache-threshold", s)
		p.send(about(held), 0)
		p.expect(why, about("abcdefghij"), candidates, want...)
	}
	f("4 of 10 is more than 0.3", Settings{}, "abcd", busy(1, 0, 0), 0)
	f("3 of 10 is not", Settings{}, "abc", busy(1, 0, 1), 1)
	f("3 of 10 is more than a ratio of 0.25", Settings{MatchRatio: 0.25}, "abc", busy(1, 0, 1), 0)
	// Pathology: up to the gate a match outweighs any queue.
	f("64 more in flight", Settings{}, "abcd", busy(64, 0, 1), 0)
	f("65 more: 65 - 0 > 64, 65 > 1.5 × 0", Settings{}, "abcd", busy(65, 0, 1), 1)
	f("300 - 210 > 64, but 300 < 1.5 × 210", Settings{}, "abcd", busy(300, 210, 210), 0)
	f("… more than 1.2 × 210", Settings{ImbalanceRatio: 1.2}, "abcd", busy(300, 210, 211), 1)
	f("10 more, and a gate of 9", Settings{ImbalanceAbs: 9}, "abcd", busy(10, 0, 1), 1)
	// Pathology: one hot backend takes the affinity of all away.
	f("a third backend is hot", Settings{}, "abcdefghij", busy(1, 80, 0), 2)
}

func TestCacheThresholdLearnsWhereSpillsWent(t *testing.T) {
	p := newRival(t, "cache-threshold", Settings{})
	p.send(about("abcd"), 0)
	p.expect("imbalanced", about("abcd"), busy(65, 0, 1), 1)
	p.expect("both hold it now", about("abcd"), busy(64, 1, 0), 0, 1)
}

func TestCacheThresholdOld(t *testing.T) {
	f := func(why string, want int, held string, candidates []Candidate) {
		t.Helper()
		p := newRival(t, "cache-threshold-old", Settings{})
		p.send(about("12345678"), 0)
		p.send(about(held), 0)
		p.send(about("qrs"), 1)
		p.send(about("tuvwx"), 2)
		p.expect(why, about("abcdefghij"), candidates, want)
	}
	f("6 of 10 is more than 0.5", 0, "abcdef", busy(30, 0, 0))
	// Trees of 13, 3 and 5 blocks. Pathology: 30 in flight do not count.
	f("5 of 10 is not: the smallest tree", 1, "abcde", busy(0, 30, 0))
	// 33 > 32, 100 × 1.1 = 110 < 133
	f("33 more in flight", 2, "abcdef", busy(133, 101, 100))
	// 33 > 32, but 1000 × 1.1 > 1033
	f("… of a thousand", 0, "abcdef", busy(1033, 1000, 1000))
}

func TestSGLangTreeIsCutBackEveryTwoMinutes(t *testing.T) {
	for _, name := range []string{"cache-threshold", "cache-threshold-old", "smg"} {
		p := newRival(t, name, Settings{MatchRatio: 0.7})
		// 67,108,864 characters are 4 blocks of 4,194,304 tokens.
		at := func(s string, after time.Duration) Request {
			r := about(s)
			r.BlockTokens, r.PromptTokens, r.Now = 4<<20, float64(4<<20*len(s)), dawn.Add(after)
			return r
		}
		p.send(at("abcdefgh", 0), 0)
		p.send(at("x", 119*time.Second), 1)
		p.expect(name+": before the walk 6 of 8 are held", at("abcdef12", 119*time.Second), busy(1, 0), 0)
		p.send(at("x", 120*time.Second), 1)
		p.expect(name+": after it the first 4 are: 4 of 5", at("abcd3", 120*time.Second), busy(1, 0), 0)
		p.expect(name+": 4 of 6", at("abcdef", 120*time.Second), busy(1, 0), 1)
	}
}

func TestSMG(t *testing.T) {
	f := func(why string, holders int, candidates []Candidate, want ...int) {
		t.Helper()
		p := newRival(t, "smg", Settings{})
		for slot := range holders {
			p.send(about("abcd"), slot)
		}
		p.expect(why, about("abcdefghij"), candidates, want...)
	}
	f("4 of 10 is more than 0.3", 1, busy(5, 0, 1), 0)
	f("a hot backend that holds nothing matters to nobody", 1, busy(10, 200, 0), 0)
	// mean 100/3 = 33.3: 100 > 50 and 100 > 97.3
	f("the holder is hot", 1, busy(100, 0, 1), 1)
	// mean 95/3 = 31.7: 95 > 47.5 but 95 < 95.7
	f("the holder is all but hot", 1, busy(95, 0, 0), 0)
	f("the least loaded of those that hold it", 3, busy(5, 3, 4, 0), 1)
	// mean 102/4 = 25.5: 102 > 89.5
	f("the hot one of two is left out", 2, busy(102, 0, 0, 0), 1)
	// The ninth, idle, is not looked at.
	f("among eight at most", 9, busy(5, 5, 5, 5, 5, 5, 4, 5, 0), 6)
	p := newRival(t, "smg", Settings{})
	p.send(about("abc"), 0)
	p.expect("3 of 10 is not more than 0.3", about("abcdefghij"), busy(1, 0), 1)
}

func TestHashTrieTakesAnyMatch(t *testing.T) {
	p := newRival(t, "hashtrie", Settings{})
	p.send(about("a"), 0)
	// Pathology: a shared first block brings everything to one backend.
	p.expect("1 of 10, and a thousand in flight", about("abcdefghij"), busy(1000, 0), 0)
	seen := map[int]bool{}
	for unknown := range 20 {
		r := about(string(rune('A' + unknown)))
		seen[p.Choose(&r, busy(1000, 0))] = true
	}
	if len(seen) != 2 {
		t.Errorf("twenty unknown prompts went to %v of two backends, one of them full", seen)
	}
	p.send(about("abc"), 1)
	p.expect("3 of 4 against all of them", about("abcd"), busy(0, 0), 0)
}

func TestRay(t *testing.T) {
	p := newRival(t, "ray", Settings{})
	p.send(about("a"), 0)
	p.send(about("12345"), 0)
	p.send(about("qr"), 1)
	// 1 of 10 is 0.1; 10 more in flight are not more than 10.
	p.expect("a tenth is enough", about("abcdefghij"), busy(10, 0), 0)
	p = newRival(t, "ray", Settings{})
	p.send(about("a"), 0)
	p.send(about("qr"), 1)
	p.send(about("stu"), 2)
	p.expect("1 of 11 is not: the smallest tree", about("abcdefghijk"), busy(9, 1, 0), 0)
	p.expect("11 more in flight: the less loaded of two", about("qr"), busy(0, 11), 0)
	p.expect("no text: the same", Request{Now: dawn}, busy(1, 3), 0)
}

func TestRayForgetsNothing(t *testing.T) {
	p := newRival(t, "ray", Settings{MatchRatio: 0.95})
	at := func(s string, after time.Duration) Request {
		r := about(s)
		r.BlockTokens, r.PromptTokens, r.Now = 10_000, float64(10_000*len(s)), dawn.Add(after)
		return r
	}
	// With eviction a tree of 400,000 characters, 10 of these blocks, is cut.
	p.send(at("abcdefghijk", 0), 0)
	p.send(at("x", 0), 1)
	p.send(at("y", time.Hour), 2)
	p.expect("11 blocks, an hour later", at("abcdefghijk", time.Hour), busy(1, 0, 0), 0)
}

func TestDynamo(t *testing.T) {
	f := func(why string, want int, after time.Duration, a, b Candidate) {
		t.Helper()
		p := newRival(t, "dynamo", Settings{})
		p.send(about("abcdefgh"), 0)
		r := about("abcdefghij")
		r.Now = dawn.Add(after)
		p.expect(why, r, fleet(a, b), want)
	}
	f("640 - 512 against 640 tokens", 0, 0, Candidate{}, Candidate{})
	f("600 + 128 against 640", 1, 0, Candidate{UnstartedTokens: 600}, Candidate{})
	// Pathology: 600 tokens of context weigh as much as 600 of prefill.
	f("the same in decode", 1, 0, Candidate{ContextTokens: 600}, Candidate{})
	f("500 + 128 against 640", 0, 0, Candidate{ContextTokens: 500}, Candidate{})
	f("after 120 s it is still there", 0, 120*time.Second, Candidate{UnstartedTokens: 1}, Candidate{})
	f("… and then no longer", 1, 120*time.Second+1, Candidate{UnstartedTokens: 1}, Candidate{})
}
