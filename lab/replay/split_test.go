package replay

import (
	"strings"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
)

// pair is one replica for prefill and one for decode, between which a transfer takes 100 ms and 10 µs a token.
func pair(w Workload) *Scenario {
	e := linear
	e.TransferTime, e.TransferTokenBytes, e.TransferBandwidth = 100*time.Millisecond, 1000, 1e8
	return &Scenario{Backends: 2, Prefills: 1, Decodes: 1, Split: SplitAlways, Engine: e, Policy: "prefix", Workload: w}
}

// mustPlaySplit is mustPlay, and checks that no blocks stay pinned.
func mustPlaySplit(t *testing.T, s *Scenario) Summary {
	t.Helper()
	r, sum := mustPlay(t, s)
	for i, p := range r.fleet {
		if st := p.ranks[0].engine.Stats(); st.KVUsage > 0 || st.ExpiredLeases > 0 {
			t.Errorf("replica %d has %v of its cache in use in the end, and %d leases expired", i, st.KVUsage, st.ExpiredLeases)
		}
	}
	if sum.Lost > 0 {
		t.Errorf("%d were lost: %v", sum.Lost, sum.Errors)
	}
	return sum
}

func TestSplitRequest(t *testing.T) {
	figures := mustPlaySplit(t, pair(jobs{asks(0, 8000, 2, 1)}))
	// The prefill takes 1.008 s and the transfer 0.18, after which a step without work ends. The last token is computed again.
	transfer := 0.184 + 0.008 + 1.0/8000
	seconds(t, "KV transfer", figures.KVTransferMean, transfer)
	seconds(t, "TTFT", figures.TTFTMean, 1.008+transfer)
	gap := 0.008 + 40e-6 + 8001*24e-9
	seconds(t, "E2E", figures.E2EMean, 1.008+transfer+gap)
	if figures.ITLP99 < gap/gapResolution || figures.ITLP99 > gap*gapResolution {
		t.Errorf("99 %% of the gaps are below %v s, and the only one is %v s", figures.ITLP99, gap)
	}
	if figures.SplitShare != 1 {
		t.Errorf("%v of the requests were split", figures.SplitShare)
	}
}

func TestSplitNever(t *testing.T) {
	s := pair(jobs{asks(0, 8000, 2, 1)})
	s.Split = SplitNever
	figures := mustPlaySplit(t, s)
	seconds(t, "TTFT", figures.TTFTMean, 1.008)
	if figures.SplitShare != 0 || figures.KVTransferMean != 0 {
		t.Errorf("%+v", figures)
	}
	if work := figures.Timeline.Work; sum(work[0]) != 0 || sum(work[1]) != 8000 {
		t.Error("the replica for prefill computed something")
	}
}

// TestSplitOverChanges restarts or removes each replica in each part of a split request, which is completed by others.
func TestSplitOverChanges(t *testing.T) {
	const prefill, transfer, decode = 500 * time.Millisecond, 1100 * time.Millisecond, 1500 * time.Millisecond
	for _, c := range []struct {
		name             string
		change           Change
		split            float64 // share
		prefills, others float64 // tokens that the replica for prefill and the others compute
	}{
		{"the only replica for prefill is down", Change{Backend: 0, Kind: Leave}, 0, 0, 8000},
		{"it is restarted during the prefill", Change{At: prefill, Backend: 0, Kind: Restart, Away: time.Hour}, 0, 0, 8000},
		{"it is restarted during the transfer", Change{At: transfer, Backend: 0, Kind: Restart, Away: time.Hour}, 1, 8000, 8000},
		{"it is restarted later", Change{At: decode, Backend: 0, Kind: Restart, Away: time.Hour}, 1, 8000, 1},
		{"the replica for decode is down after the prefill", Change{At: prefill, Backend: 1, Kind: Restart, Away: time.Hour}, 1, 8000, 1},
		{"that is restarted during the transfer", Change{At: transfer, Backend: 1, Kind: Restart, Away: time.Hour}, 0, 8000, 8000},
		{"that is restarted during its output", Change{At: decode, Backend: 1, Kind: Restart, Away: time.Hour}, 0, 8000, 8001},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := pair(jobs{asks(time.Millisecond, 8000, 200, 1)})
			s.Backends, s.Decodes, s.Changes = 3, 2, []Change{c.change}
			s.Queue = worldQueue()
			if c.change.Backend == 1 { // the request goes there for sure
				s.Changes = append(s.Changes, Change{Backend: 2, Kind: Leave}, Change{At: 2 * time.Millisecond, Backend: 2, Kind: Join})
			}
			figures := mustPlaySplit(t, s)
			work := figures.Timeline.Work
			if prefills, others := sum(work[0]), sum(work[1])+sum(work[2]); figures.SplitShare != c.split || prefills != c.prefills ||
				others != c.others {
				t.Errorf("%v of the requests were split, with %v and %v tokens computed; want %v, %v and %v", figures.SplitShare, prefills, others,
					c.split, c.prefills, c.others)
			}
		})
	}
}

// TestSplitCachedTokens sends a prompt to a second replica for decode, while that for prefill has it.
func TestSplitCachedTokens(t *testing.T) {
	s := pair(jobs{asks(time.Millisecond, 8192, 2, 1), asks(10*time.Second, 8192, 2, 1)})
	s.Backends, s.Decodes = 3, 2
	s.Changes = []Change{{Backend: 2, Kind: Leave}, {At: 5 * time.Second, Backend: 2, Kind: Join},
		{At: 6 * time.Second, Backend: 1, Kind: Leave}}
	figures := mustPlaySplit(t, s)
	seconds(t, "hit ratio", figures.HitRatio, 7680.0/8192/2)
	if figures.PredictedHitRatio < 0.45 || figures.PredictionError > 0.05 {
		t.Errorf("a share of %v was predicted to be cached, with an error of %v", figures.PredictedHitRatio, figures.PredictionError)
	}
}

// TestSplitWaitsLongerThanLease has a decode request wait for room in its engine's cache, which renews the lease.
func TestSplitWaitsLongerThanLease(t *testing.T) {
	s := pair(jobs{asks(0, 3000, 5000, 1), asks(time.Second, 8000, 10, 2), asks(35*time.Second, 1000, 5, 3)})
	s.KVTokens = 10_240
	if figures := mustPlaySplit(t, s); figures.E2EP99 < 2+kvLease.Seconds() {
		t.Errorf("it waited for %v s", figures.E2EP99)
	}
}

// TestSplitUnderLoad plays many requests with small caches, in which both kinds of requests wait for room.
func TestSplitUnderLoad(t *testing.T) {
	for _, split := range []Split{SplitAlways, SplitByCost, SplitNever} {
		w := SharedPrompts{Prompts: 40, PromptTokens: 4096, Zipf: 0.8, OwnTokens: 2000, Output: 100, Rate: 8, For: 30 * time.Second}
		s := &Scenario{Backends: 5, Prefills: 2, Decodes: 3, Split: split, KVTokens: 40_000, Policy: "prefix", Queue: worldQueue(), Workload: w,
			Engine: engine.Config{PrefillRate: 20_000}}
		figures := mustPlaySplit(t, s)
		if got := figures.SplitShare > 0; got != (split != SplitNever) {
			t.Errorf("%s: %v of the requests were split", split, figures.SplitShare)
		}
	}
}

func TestRolesAreValidated(t *testing.T) {
	for want, change := range map[string]func(*Scenario){
		"2 replicas for prefill and 1 for decode among 2": func(s *Scenario) { s.Prefills = 2 },
		"policy pooled knows no roles":                    func(s *Scenario) { s.Policy = Pooled },
		`unknown split "some"`:                            func(s *Scenario) { s.Split = "some" },
	} {
		s := pair(jobs{})
		change(s)
		if err := s.validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

func TestGapHistogram(t *testing.T) {
	var h gapHistogram
	if h.quantile(0.99) != 0 {
		t.Error("a quantile of nothing")
	}
	h.add(10*time.Millisecond, 99)
	h.add(time.Second, 1)
	for share, want := range map[float64]float64{0.5: 0.01, 0.99: 0.01, 1: 1} {
		if got := h.quantile(share); got < want/gapResolution || got > want*gapResolution {
			t.Errorf("quantile %v is %v s, want %v", share, got, want)
		}
	}
}
