package apikey

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func key(name string, change func(*Key)) Key {
	k := Key{Name: name, Hashes: []Hash{HashOf("secret of " + name)}}
	if change != nil {
		change(&k)
	}
	return k
}

// find returns the account of a key made by key.
func find(t testing.TB, s *Set, name string) *Account {
	t.Helper()
	h, known := s.Find("secret of " + name)
	if !known || h.Name != name {
		t.Fatalf("the key of %s is %+v", name, h)
	}
	return h
}

// acquire acquires a lease that must be granted.
func acquire(t testing.TB, h *Account) *Lease {
	t.Helper()
	v, limitErr := h.TryAcquire()
	if limitErr != nil {
		t.Fatalf("refused for %s", limitErr.Limit)
	}
	return &v
}

func TestFind(t *testing.T) {
	s := New([]Key{key("a", func(k *Key) { k.Hashes = append(k.Hashes, HashOf("another")) }), key("b", nil)})
	for secret, want := range map[string]string{"secret of a": "a", "another": "a", "secret of b": "b", "": "", "secret of c": "",
		"secret of a ": ""} {
		h, known := s.Find(secret)
		if known != (want != "") || known && h.Name != want {
			t.Errorf("%q is the key of %+v", secret, h)
		}
	}
	if s.Empty() || !New(nil).Empty() {
		t.Error("a set is open when it has no keys, and then only")
	}
}

func TestExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := find(t, New([]Key{key("a", func(k *Key) { k.Expires = time.Now().Add(time.Hour) })}), "a")
		if time.Sleep(time.Hour - 1); h.Expired() {
			t.Error("expired too soon")
		}
		if time.Sleep(time.Nanosecond); !h.Expired() {
			t.Error("not expired")
		}
	})
	if (&Key{}).Expired() {
		t.Error("a key without an end has one")
	}
}

func TestRequestsPerMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := find(t, New([]Key{key("a", func(k *Key) { k.RequestsPerMinute = 30 })}), "a")
		for range 30 {
			acquire(t, h).Release(0, 0)
		}
		for range 3 { // being refused costs nothing
			_, limitErr := h.TryAcquire()
			if limitErr == nil || limitErr.Limit != LimitRequests || limitErr.Max != 30 || limitErr.RetryAfter != 2*time.Second {
				t.Fatalf("got %+v", limitErr)
			}
		}
		if r, tokens := h.Rates(); r != (Rate{30, 0, time.Minute}) || tokens.Limit != 0 {
			t.Errorf("stands at %+v, %+v", r, tokens)
		}
		time.Sleep(2 * time.Second)
		acquire(t, h).Release(0, 0)
		if _, limitErr := h.TryAcquire(); limitErr == nil {
			t.Error("two requests in the time of one")
		}
	})
}

func TestReleaseChargesUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := find(t, New([]Key{key("a", func(k *Key) { k.TokensPerMinute = 6000 })}), "a")
		left := func(want int) {
			t.Helper()
			if _, r := h.Rates(); r.Remaining != want {
				t.Fatalf("%d tokens left, want %d", r.Remaining, want)
			}
		}
		v := acquire(t, h)
		if r := v.ChargePrompt(1000); r != nil {
			t.Fatal(r)
		}
		left(5000)
		v.Release(600, 400)
		left(5000)
		v = acquire(t, h)
		v.ChargePrompt(4000)
		left(1000)
		v.Release(0, 0) // no engine worked on it
		left(5000)
		v = acquire(t, h)
		v.ChargePrompt(2000)
		v.Release(2000, 9000)
		left(0)
		// 6,000 below nothing: a minute of debt, and then a second for each hundred.
		v = acquire(t, h)
		r := v.ChargePrompt(1)
		if r == nil || r.Limit != LimitTokens || r.RetryAfter < time.Minute || r.RetryAfter > time.Minute+time.Second {
			t.Fatalf("got %+v", r)
		}
		v.Release(0, 0)
		time.Sleep(time.Minute + 10*time.Second)
		left(1000)
	})
}

func TestPromptAboveTokensPerMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := find(t, New([]Key{key("a", func(k *Key) { k.TokensPerMinute = 6000 })}), "a")
		v := acquire(t, h)
		if r := v.ChargePrompt(15000); r != nil {
			t.Fatalf("refused: %+v", r)
		}
		v.Release(15000, 0)
		time.Sleep(149 * time.Second) // 9,000 of debt and a full bucket: 150 s
		v = acquire(t, h)
		if r := v.ChargePrompt(15000); r == nil || r.RetryAfter > time.Second {
			t.Errorf("got %+v, want a second to wait", r)
		}
		time.Sleep(time.Second)
		if r := v.ChargePrompt(15000); r != nil {
			t.Errorf("refused: %+v", r)
		}
		v.Release(0, 0)
	})
}

func TestInvalidUsageIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := find(t, New([]Key{key("a", func(k *Key) { k.TokensPerMinute = 1000 })}), "a")
		v := acquire(t, h)
		v.ChargePrompt(-1 << 62)
		v.Release(-1<<62, 1<<62)
		v = acquire(t, h)
		if r := v.ChargePrompt(1); r == nil || r.RetryAfter > MaxTokens/1000*time.Minute {
			t.Errorf("got %+v", r)
		}
		v.Release(0, 0)
	})
}

func TestConcurrency(t *testing.T) {
	h := find(t, New([]Key{key("a", func(k *Key) { k.Concurrency = 2 })}), "a")
	first, second := acquire(t, h), acquire(t, h)
	if _, r := h.TryAcquire(); r == nil || r.Limit != LimitConcurrency || r.Max != 2 {
		t.Fatalf("got %+v", r)
	}
	first.Release(0, 0)
	first.Release(0, 0) // a second Release does nothing
	third := acquire(t, h)
	if _, r := h.TryAcquire(); r == nil {
		t.Error("a place was given back twice")
	}
	second.Release(0, 0)
	third.Release(0, 0)
}

func TestReplaceKeepsUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bounded := func(requests, tokens, concurrency int) Key {
			return key("a", func(k *Key) { k.RequestsPerMinute, k.TokensPerMinute, k.Concurrency = requests, tokens, concurrency })
		}
		s := New([]Key{bounded(10, 1000, 2), key("gone", nil)})
		a, gone := find(t, s, "a"), find(t, s, "gone")
		v, ofGone := acquire(t, a), acquire(t, gone)
		v.ChargePrompt(900)
		s.Replace([]Key{bounded(20, 2000, 1), key("new", nil)})

		if _, known := s.Find("secret of gone"); known {
			t.Error("a key that is gone is valid")
		}
		now := find(t, s, "a")
		if _, r := now.TryAcquire(); r == nil || r.Limit != LimitConcurrency || r.Max != 1 {
			t.Errorf("got %+v: the request in flight is not counted", r)
		}
		if r, tokens := now.Rates(); r.Limit != 20 || r.Remaining != 9 || tokens.Limit != 2000 || tokens.Remaining != 100 {
			t.Errorf("stands at %+v, %+v", r, tokens)
		}
		v.Release(950, 100)
		ofGone.Release(1, 1) // the last request of a key that is gone
		uses := s.Usage()
		if len(uses) != 2 || uses[0].Name != "a" || uses[0].Requests != 1 ||
			uses[0].InFlight != 0 || uses[0].Refused[string(LimitConcurrency)] != 1 || uses[1].Name != "new" || uses[1].Requests != 0 {
			t.Errorf("used: %+v", uses)
		}
		s.Replace([]Key{bounded(0, 0, 0)}) // the bounds go
		acquire(t, find(t, s, "a")).Release(1e6, 1e6)
		s.Replace([]Key{bounded(5, 0, 0)}) // one comes
		if r, _ := find(t, s, "a").Rates(); r.Limit != 5 || r.Remaining != 5 {
			t.Errorf("stands at %+v", r)
		}
	})
}

func TestConcurrentUse(t *testing.T) {
	terms := func(n int) []Key {
		return []Key{key("a", func(k *Key) { k.Concurrency, k.TokensPerMinute, k.RequestsPerMinute = 4, 1<<30+n, 1<<20+n })}
	}
	s := New(terms(0))
	var running sync.WaitGroup
	for g := range 8 {
		running.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(g)))
			for i := range 500 {
				h, _ := s.Find("secret of a")
				if v, r := h.TryAcquire(); r == nil {
					if v.ChargePrompt(random.IntN(100)) == nil {
						h.Rates()
					}
					v.Release(1, 2)
				}
				if g == 0 {
					s.Replace(terms(i))
					s.Usage()
				}
			}
		})
	}
	running.Wait()
	u := s.Usage()[0]
	if u.InFlight != 0 || u.Requests+u.Refused[string(LimitConcurrency)] != 8*500 {
		t.Errorf("used: %+v", u)
	}
}

func TestMayUse(t *testing.T) {
	k := Key{Models: []string{"a", "org/b"}}
	for id, want := range map[string]bool{"a": true, "org/b": true, "A": false, "b": false, "": false, "a ": false} {
		if k.MayUse(id) != want {
			t.Errorf("may use %q: %v", id, !want)
		}
	}
	if all := (Key{}); !all.MayUse("anything") {
		t.Error("a key without a list is for all models")
	}
}

func BenchmarkFind(b *testing.B) {
	var list []Key
	for i := range 1000 {
		list = append(list, key(fmt.Sprint(i), nil))
	}
	s := New(list)
	b.ReportAllocs()
	for b.Loop() {
		s.Find("secret of 500, as long as keys are made with openssl rand -hex 32")
	}
}
