package apikey

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"testing/synctest"
	"time"
)

func newSharedSet(proxies int, connected bool) (*Set, *Account) {
	s := New([]Key{{Name: "k", RequestsPerMinute: 60, TokensPerMinute: 6000, Concurrency: 5}})
	s.SetProxies(proxies, connected)
	return s, s.FindName("k")
}

// acquireAll returns how many requests a key may have at once, and releases them.
func acquireAll(t *testing.T, a *Account) (n int) {
	t.Helper()
	var leases []Lease
	for {
		lease, err := a.TryAcquire()
		if err != nil {
			break
		}
		leases = append(leases, lease)
	}
	for i := range leases {
		leases[i].Release(0, 0)
	}
	return len(leases)
}

func TestConcurrencyIsDivided(t *testing.T) {
	for proxies, want := range map[int]int{0: 5, 1: 5, 2: 3, 3: 2, 5: 1, 100: 1} {
		_, a := newSharedSet(proxies, true)
		if got := acquireAll(t, a); got != want {
			t.Errorf("%d proxies: %d requests at once, want %d", proxies, got, want)
		}
	}
}

func TestChargesAreExchanged(t *testing.T) {
	from, a := newSharedSet(2, true)
	to, b := newSharedSet(2, true)
	lease, err := a.TryAcquire()
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.ChargePrompt(1000); err != nil {
		t.Fatal(err)
	}
	lease.Release(900, 300)
	charges := from.TakeCharges()
	if want := []Charge{{"k", 1, 1200}}; !reflect.DeepEqual(charges, want) {
		t.Fatalf("charged %+v, want %+v", charges, want)
	}
	if again := from.TakeCharges(); again != nil {
		t.Errorf("charged again: %+v", again)
	}
	for _, c := range charges {
		to.ApplyCharge(c)
	}
	to.ApplyCharge(Charge{"unknown", 1, 1})
	requests, tokens := b.Rates()
	if requests.Remaining != 59 || tokens.Remaining < 4800 || tokens.Remaining > 4900 {
		t.Errorf("%d requests and %d tokens remain, want 59 and 4800", requests.Remaining, tokens.Remaining)
	}
	if charged := to.TakeCharges(); charged != nil {
		t.Errorf("the charge of another proxy is reported again: %+v", charged)
	}
}

func TestChargesWithoutConnection(t *testing.T) {
	s, a := newSharedSet(3, false)
	lease, err := a.TryAcquire()
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.ChargePrompt(1000); err != nil {
		t.Fatal(err)
	}
	lease.Release(900, 300)
	if requests, tokens := a.Rates(); requests.Remaining != 57 || tokens.Remaining < 6000-3600 || tokens.Remaining > 6000-3500 {
		t.Errorf("%d requests and %d tokens remain, want 57 and 2400: as if the two others charged the same", requests.Remaining,
			tokens.Remaining)
	}
	if charges := s.TakeCharges(); charges != nil {
		t.Errorf("%+v would be charged to the others a second time", charges)
	}
	// A prompt above the bucket needs a full one, not three.
	s.SetProxies(3, false)
	s.Replace([]Key{{Name: "k2", TokensPerMinute: 1000}})
	lease, err = s.FindName("k2").TryAcquire()
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.ChargePrompt(900); err != nil {
		t.Errorf("a prompt that fits into a full bucket is refused: %v", err)
	}
}

func TestImplausibleCharge(t *testing.T) {
	s, a := newSharedSet(2, true)
	s.ApplyCharge(Charge{"k", 1 << 62, 1 << 62})
	requests, tokens := a.Rates()
	if requests.Reset > 11*60e9 || tokens.Reset > 11*60e9 {
		t.Errorf("the key is refused for %v and %v", requests.Reset, tokens.Reset)
	}
	s.ApplyCharge(Charge{"k", -1 << 62, -1 << 62})
	if requests, tokens = a.Rates(); requests.Remaining > 60 || tokens.Remaining > 6000 {
		t.Errorf("%d requests and %d tokens remain, more than a bucket holds", requests.Remaining, tokens.Remaining)
	}
}

// TestRatesHoldOverAllProxies sends more than the rates allow to several proxies for five minutes,
// which exchange their charges every 0.1 s, or not at all.
func TestRatesHoldOverAllProxies(t *testing.T) {
	for _, c := range []struct {
		proxies   int
		connected bool
	}{{2, true}, {4, true}, {2, false}, {4, false}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sets := make([]*Set, c.proxies)
				for i := range sets {
					sets[i] = New([]Key{{Name: "k", RequestsPerMinute: 600, TokensPerMinute: 300_000}})
					sets[i].SetProxies(c.proxies, c.connected)
				}
				random := rand.New(rand.NewPCG(1, 1))
				requests, tokens := 0, 0
				for tick := range 5 * 60 * 100 {
					time.Sleep(10 * time.Millisecond)
					for range 2 {
						lease, err := sets[random.IntN(len(sets))].FindName("k").TryAcquire()
						if err != nil {
							continue
						}
						used := 500 + random.IntN(500)
						if err := lease.ChargePrompt(400); err != nil {
							lease.Release(0, 0)
							continue
						}
						lease.Release(400, used-400)
						requests, tokens = requests+1, tokens+used
					}
					if tick%10 != 0 || !c.connected {
						continue
					}
					for i, from := range sets {
						for _, charge := range from.TakeCharges() {
							for j, to := range sets {
								if i != j {
									to.ApplyCharge(charge)
								}
							}
						}
					}
				}
				const allowed = 6 * 300_000 // a full bucket and five minutes
				if ratio := float64(tokens) / allowed; ratio < 0.95 || ratio > 1.05 {
					t.Errorf("%d requests with %d tokens were admitted, %.3f of what one proxy admits", requests, tokens, ratio)
				}
			})
		})
	}
}
