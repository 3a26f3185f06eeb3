package replay

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/lab/sim/engine"
	"warmroute/router"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// jobs is a workload of requests that are given one by one.
type jobs []*Job

func (w jobs) Requests(int, uint64) (*Requests, error) {
	return &Requests{BlockTokens: generatedBlockTokens, Total: len(w), Open: w}, nil
}

// asks makes a request whose prompt shares its blocks with all others of the same id.
func asks(at time.Duration, promptTokens, outputTokens int, id uint64) *Job {
	var c chain
	for len(c.cache) < promptTokens/generatedBlockTokens {
		c.add(id)
	}
	return c.newJob(at, promptTokens, outputTokens, generatedBlockTokens)
}

// mustPlay runs a scenario, and checks that every request ended once and that
// nothing is left over.
func mustPlay(t *testing.T, s *Scenario) (*run, Summary) {
	t.Helper()
	requests, err := s.Workload.Requests(s.Backends, s.Seed)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRun(s, requests)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.processEvents(context.Background()); err != nil {
		t.Fatal(err)
	}
	sum := r.summary()
	if sum.Requests+sum.Lost != requests.Total || r.arrivals != requests.Total {
		t.Errorf("%s: of %d requests %d were sent, %d were completed and %d lost", s.Policy, requests.Total, r.arrivals, sum.Requests, sum.Lost)
	}
	for i, p := range r.fleet {
		if n := p.backend.InFlight.Load(); n != 0 || len(p.requests) != 0 || r.measured.timeline.count[i] != 0 {
			t.Errorf("%s: in the end %s has %d in flight by the router's account, %d by the replica's, %d by the timeline's",
				s.Policy, p.backend.Name, n, len(p.requests), r.measured.timeline.count[i])
		}
	}
	return r, sum
}

// linear makes the times below easy to compute. The workloads of several tests were chosen for it.
var linear = engine.Config{
	StepTime: 8 * time.Millisecond, PrefillRate: 8000, DecodeTime: 40 * time.Microsecond, ContextTime: 24 * time.Nanosecond,
	QuadraticDepth: engine.LinearPrefill, PromptTokenTime: engine.NoAPIServer,
}

// withSteps returns linear with steps of up to so many tokens.
func withSteps(tokens int) engine.Config {
	c := linear
	c.StepTokens = tokens
	return c
}

func seconds(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-6 {
		t.Errorf("%s is %.6f s, want %.6f", what, got, want)
	}
}

func TestTwoRequests(t *testing.T) {
	for _, name := range []string{"round-robin", Pooled} {
		_, sum := mustPlay(t, &Scenario{Backends: 1, Engine: linear, Policy: name, Workload: jobs{
			asks(0, 8000, 2, 1),
			asks(2*time.Second, 8000, 1, 1), // 15 blocks of it cached: 320 tokens are left
		}})
		first, second := 0.008+1, 0.008+0.04
		seconds(t, "mean TTFT", sum.TTFTMean, (first+second)/2)
		seconds(t, "TPOT", sum.TPOTMean, 0.008+40e-6+8001*24e-9)
		seconds(t, "mean E2E", sum.E2EMean, (first+sum.TPOTMean+second)/2)
		seconds(t, "hit ratio", sum.HitRatio, 7680.0/16000)
		seconds(t, "throughput", sum.Throughput, 2/(2+second))
	}
}

func TestRequestWaitsForCurrentStep(t *testing.T) {
	_, sum := mustPlay(t, &Scenario{Backends: 1, Engine: linear, Policy: "random", Workload: jobs{
		asks(0, 4000, 1, 1),                    // until 0.508
		asks(100*time.Millisecond, 4000, 1, 2), // from then on
		asks(200*time.Millisecond, 800, 1, 3),  // in the same step
	}})
	end := 0.508 + 0.008 + 4800.0/8000
	seconds(t, "mean TTFT", sum.TTFTMean, (0.508+end-0.1+end-0.2)/3)
}

func TestSpeed(t *testing.T) {
	_, sum := mustPlay(t, &Scenario{Backends: 1, Engine: linear, Policy: "random", Speeds: []float64{0.5},
		Workload: jobs{asks(0, 8000, 1, 1)}})
	seconds(t, "TTFT", sum.TTFTMean, 2*1.008)
}

func TestPromptTooLongForCache(t *testing.T) {
	_, sum := mustPlay(t, &Scenario{Backends: 2, KVTokens: 8192, Policy: "prefix", Workload: jobs{
		asks(0, 9000, 1, 1), asks(time.Second, 100, 1, 2),
	}})
	if sum.Lost != 1 || sum.Requests != 1 {
		t.Errorf("lost %v and completed %d, want one of each", sum.Errors, sum.Requests)
	}
}

// busy is a workload with everything in it: shared prefixes, turns, pauses.
var busy = Agentic{Concurrency: 8, Sessions: 16}

// eventful is a scenario in which everything happens that can.
func eventful(name string) *Scenario {
	s := &Scenario{
		Backends: 4, KVTokens: 204_800, Policy: name, Workload: busy, Seed: 7,
		Speeds: []float64{1, 0.5}, Queue: router.QueueSettings{Requests: 1000, Bytes: 1 << 30, NoneReadyTimeout: time.Hour,
			BusyTimeout: time.Hour},
		PollLag: 100 * time.Millisecond, NonStreaming: 0.3, IndexFactor: 0.5, Evictions: 1,
	}
	if name != Pooled {
		s.Changes = []Change{
			{At: 20 * time.Second, Backend: 1, Kind: Restart, Away: 10 * time.Second},
			{At: 25 * time.Second, Backend: 3, Kind: Join},
			{At: 40 * time.Second, Backend: 0, Kind: Leave},
			{At: 50 * time.Second, Backend: 2, Kind: Restart},
			{At: 55 * time.Second, Backend: 1, Kind: Freeze, Away: 20 * time.Second},
		}
		s.External = []ExternalLoad{{Backends: []int{1, 2}, Rate: 2, Prompt: 3000, Output: 50, From: 5 * time.Second, Until: 60 * time.Second}}
	}
	return s
}

func TestEveryRequestEndsOnce(t *testing.T) {
	for _, name := range append(policies.All().Names(), Pooled) {
		_, sum := mustPlay(t, eventful(name))
		if sum.Lost > 0 {
			t.Errorf("%s lost %v, though a backend was ready all the time", name, sum.Errors)
		}
	}
}

func TestRanks(t *testing.T) {
	work := jobs{
		asks(0, 8000, 1, 1), asks(0, 8000, 1, 2), // one on each engine
		asks(3*time.Second, 8000, 1, 2), // on the first, which lacks the prompt
	}
	for _, c := range []struct {
		ranks    int
		hits     int
		meanTTFT float64
	}{
		{0, 7680, (2*(0.008+2) + 0.008 + 0.04) / 3}, // both prompts in one sequence of steps
		{2, 0, 1.008},
	} {
		r, sum := mustPlay(t, &Scenario{Backends: 1, Ranks: c.ranks, Engine: withSteps(16_384), KVTokens: 20_480, Policy: "random",
			Workload: work})
		if hits := int(math.Round(sum.HitRatio * 24_000)); hits != c.hits {
			t.Errorf("%d ranks: %d tokens hit, want %d", c.ranks, hits, c.hits)
		}
		seconds(t, "mean TTFT", sum.TTFTMean, c.meanTTFT)
		if got, want := r.fleet[0].reportedLoad(wallTime(r.now), 1).CacheTokens, 20_480*max(1, c.ranks); got != want {
			t.Errorf("%d ranks: a cache of %d tokens, want %d", c.ranks, got, want)
		}
	}
	for _, name := range []string{"prefix", Pooled} {
		s := eventful(name)
		s.Ranks = 3
		mustPlay(t, s)
	}
}

// One server of eight ranks: routed to as eight backends, it is worth about as much as eight replicas.
func TestRankRouting(t *testing.T) {
	play := func(change func(*Scenario)) Summary {
		s := &Scenario{
			Backends: 1, Ranks: 8, Engine: linear, KVTokens: 400_000, Policy: "prefix",
			Workload: Agentic{Concurrency: 32, Sessions: 64}, Seed: 1,
		}
		change(s)
		sum, err := s.Run(t.Context())
		if err != nil || sum.Lost > 0 {
			t.Fatal(err, sum.Errors)
		}
		return sum
	}
	routed := play(func(s *Scenario) { s.RankRouting = true })
	balanced := play(func(*Scenario) {})
	separate := play(func(s *Scenario) { s.Backends, s.Ranks = 8, 1 })
	if ratio := routed.TTFTMean / balanced.TTFTMean; ratio > 0.7 {
		t.Errorf("mean TTFT %.3f of that of the server that chooses the ranks", ratio)
	}
	if ratio := routed.HitRatio / separate.HitRatio; ratio < 0.97 {
		t.Errorf("hit ratio %.3f of that of separate replicas", ratio)
	}
}

// The ranks of a mixture of experts wait for the longest step of each.
func TestLockstep(t *testing.T) {
	work := jobs{asks(0, 8000, 3, 1), asks(500*time.Millisecond, 80, 3, 2)}
	for _, lockstep := range []bool{false, true} {
		for _, routed := range []bool{false, true} {
			s := &Scenario{
				Backends: 1, Ranks: 2, Engine: withSteps(16_384), KVTokens: 20_480,
				Policy: "round-robin", Workload: work, Lockstep: lockstep, RankRouting: routed,
			}
			sum, err := s.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := (1.008 + 0.018) / 2 // the short prompt is prefilled beside the long one
			if lockstep {
				want = (1.008 + 0.526) / 2 // after its step
			}
			seconds(t, fmt.Sprintf("mean TTFT, lockstep %v, routed %v", lockstep, routed), sum.TTFTMean, want)
		}
	}
}

func TestSameSeedSameRun(t *testing.T) {
	for _, name := range []string{"prefix", "random", Pooled} {
		play := func(seed uint64) Summary {
			s := eventful(name)
			s.Seed = seed
			sum, err := s.Run(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			return sum
		}
		one := play(1)
		if two := play(1); !reflect.DeepEqual(one, two) {
			t.Errorf("%s: two runs of one seed differ:\n%+v\n%+v", name, one, two)
		}
		if other := play(2); one.TTFTMean == other.TTFTMean {
			t.Errorf("%s: another seed changed nothing", name)
		}
	}
}

func TestRunEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := eventful("prefix").Run(ctx); err != context.Canceled {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestInvalidScenarios(t *testing.T) {
	for name, spoil := range map[string]func(*Scenario){
		"no backend":              func(s *Scenario) { s.Backends = 0 },
		"fewer than no ranks":     func(s *Scenario) { s.Ranks = -1 },
		"more speeds than places": func(s *Scenario) { s.Speeds = make([]float64, 9) },
		"a speed of 0":            func(s *Scenario) { s.Speeds = []float64{0} },
		"changes of ranks":        func(s *Scenario) { s.RankRouting, s.Changes = true, []Change{{}} },
		"no workload":             func(s *Scenario) { s.Workload = nil },
		"an empty trace":          func(s *Scenario) { s.Workload = Traced{Trace: &Trace{}} },
		"an unknown policy":       func(s *Scenario) { s.Policy = "guess" },
		"a change beyond":         func(s *Scenario) { s.Changes = []Change{{Backend: 4}} },
		"external without a rate": func(s *Scenario) { s.External = []ExternalLoad{{Backends: []int{0}, Prompt: 1, Output: 1}} },
		"external beyond":         func(s *Scenario) { s.External = []ExternalLoad{{Backends: []int{4}, Rate: 1, Prompt: 1, Output: 1}} },
		"changes of a pool":       func(s *Scenario) { s.Policy = Pooled },
		"endless evictions":       func(s *Scenario) { s.Evictions = math.Inf(1) },
		"an endless index":        func(s *Scenario) { s.IndexFactor = math.Inf(1) },
		"an index of no size":     func(s *Scenario) { s.IndexFactor = math.NaN() },
		"text of no length":       func(s *Scenario) { s.TextSpread = 1 },
		"endless prefill":         func(s *Scenario) { s.Engine.QuadraticDepth = math.Inf(1) },
		"polls without a pause":   func(s *Scenario) { s.PollInterval = 1 },
		"polls before their time": func(s *Scenario) { s.PollLag = -1 },
	} {
		s := eventful("prefix")
		spoil(s)
		if _, err := s.Run(context.Background()); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestTextSpread(t *testing.T) {
	f := func(spread, least, most float64) {
		t.Helper()
		s := &Scenario{Backends: 2, Policy: "prefix", Workload: HotPrompts(1, 20), TextSpread: spread}
		r, sum := mustPlay(t, s)
		low, high := math.Inf(1), 0.0
		for n := range r.arrivals {
			perToken := float64(r.textBytes(&request{job: &Job{Prompt: 10_000}, number: n})) / 10_000
			low, high = min(low, perToken), max(high, perToken)
		}
		if math.Abs(low-least) > 0.01 || math.Abs(high-most) > 0.01 {
			t.Errorf("a spread of %g: %.3f to %.3f bytes a token, want %g to %g", spread, low, high, least, most)
		}
		if sum.Lost > 0 || sum.PromptTokens != 2088*r.requests.Total {
			t.Errorf("a spread of %g: %d lost, and %d prompts of %d tokens in all", spread, sum.Lost, r.requests.Total, sum.PromptTokens)
		}
		promised := float64(r.measured.promptTokens) / float64(sum.PromptTokens)
		if uneven := math.Abs(promised-1) > 0.0001; uneven != (spread > 0) {
			t.Errorf("a spread of %g: the router took the prompts for %.4f of their tokens", spread, promised)
		}
	}
	f(0, 4, 4)
	f(0.25, 3, 5)
}

func TestProgress(t *testing.T) {
	var seen []string
	s := &Scenario{Backends: 2, Policy: "random", Workload: HotPrompts(1, 2), Progress: func(done, total int) {
		seen = append(seen, fmt.Sprintf("%d/%d", done, total))
	}}
	_, sum := mustPlay(t, s)
	if want := fmt.Sprintf("%d/%d", sum.Requests, sum.Requests); len(seen) < 4 || seen[0] != "128"+want[3:] || seen[len(seen)-1] != want {
		t.Errorf("progress was %v, want it to begin with 128 and end with %s", seen, want)
	}
}

func TestPooledCache(t *testing.T) {
	work := jobs{asks(0, 8000, 100, 1), asks(1500*time.Millisecond, 8000, 1, 1)}
	_, sum := mustPlay(t, &Scenario{Backends: 2, Engine: linear, Policy: Pooled, Workload: work})
	if sum.HitRatio != 0.48 || sum.Timeline.Work[1][1] != 320 {
		t.Errorf("hit ratio %.2f, and the second replica prefilled %v; want 0.48 and 320 tokens in the second second", sum.HitRatio,
			sum.Timeline.Work[1])
	}
}

func TestEngineSettings(t *testing.T) {
	c := withSteps(2048)
	c.QuadraticDepth = 1e-3
	_, sum := mustPlay(t, &Scenario{Backends: 1, Engine: c, Policy: "random", Workload: jobs{asks(0, 4096, 1, 1)}})
	seconds(t, "TTFT", sum.TTFTMean, 2*0.008+0.256*(1+1.024)+0.256*(1+3.072))
}

func TestRestartLosesCacheAndRetries(t *testing.T) {
	restart := Change{At: 500 * time.Millisecond, Backend: 0, Kind: Restart, Away: time.Second}
	_, sum := mustPlay(t, &Scenario{
		Backends: 2, Engine: linear, Policy: "prefix", Changes: []Change{restart}, NonStreaming: 1,
		Workload: jobs{asks(0, 8000, 10, 1), asks(0, 8000, 10, 2)},
	})
	// One of the two was on backend 0, and began again behind the other, whose
	// step ends at 1.008 s.
	seconds(t, "TTFT of the request sent again", sum.TTFTP99, 1.008+0.008+40e-6+8001*24e-9+1)
	if sum.Timeline.Work[0][0] != 0 {
		t.Errorf("the restarted replica is said to have prefilled %.0f tokens, of a step that never ended", sum.Timeline.Work[0][0])
	}

	again := Change{At: 5 * time.Second, Backend: 0, Kind: Restart}
	r, sum := mustPlay(t, &Scenario{
		Backends: 1, Policy: "prefix", Changes: []Change{again},
		Workload: jobs{asks(0, 8000, 1, 1), asks(10*time.Second, 8000, 1, 1)},
	})
	if sum.HitRatio != 0 || r.measured.predictedTokens != 0 {
		t.Errorf("after the restart %.2f hit and %d tokens predicted, want none", sum.HitRatio, r.measured.predictedTokens)
	}
}

func TestJoinAndLeave(t *testing.T) {
	r, sum := mustPlay(t, &Scenario{
		Backends: 3, Policy: "least-load", Workload: HotPrompts(1, 20),
		Changes: []Change{{At: 100 * time.Second, Backend: 2, Kind: Join}, {At: 200 * time.Second, Backend: 0, Kind: Leave}},
	})
	work := func(backend, from, to int) float64 {
		total := 0.0
		for _, x := range sum.Timeline.InFlight[backend][from:min(to, len(sum.Timeline.InFlight[backend]))] {
			total += x
		}
		return total
	}
	if n := work(2, 0, 100); n != 0 {
		t.Errorf("before it joined, backend 2 had %.2f in flight", n)
	}
	if n, all := work(2, 101, 200), work(0, 101, 200)+work(1, 101, 200); n < 0.4*all {
		t.Errorf("after it joined, backend 2 had %.0f in flight, where the others together had %.0f", n, all)
	}
	if n := work(0, 210, 300); n != 0 {
		t.Errorf("long after it left, backend 0 had %.2f in flight", n)
	}
	if s := r.fleet[0].backend.State(); s != backends.Down {
		t.Errorf("the backend that left is %v", s)
	}
}

func TestReturnAfterRestarts(t *testing.T) {
	const away = 20 * time.Second
	at := func(seconds int, what ChangeKind) Change {
		return Change{At: time.Duration(seconds) * time.Second, Backend: 1, Kind: what, Away: away}
	}
	f := func(why string, from, until int, changes ...Change) {
		t.Helper()
		work := HotPrompts(1, 20)
		work.For = 100 * time.Second
		_, sum := mustPlay(t, &Scenario{Backends: 2, Policy: "round-robin", Workload: work, Changes: changes})
		for second, n := range sum.Timeline.InFlight[1][:95] {
			// A backend that leaves finishes its requests.
			if gone := second > from && second < until; gone != (n == 0) && second > 1 && second != from && second != until {
				t.Errorf("%s: in second %d the backend has %.2f in flight, and is to be away from %d until %d", why, second, n, from, until)
				return
			}
		}
	}
	f("a restart", 20, 40, at(20, Restart))
	f("left while it restarts", 20, 95, at(20, Restart), at(30, Leave))
	f("restarted after it left", 40, 95, at(39, Leave), at(40, Restart))
	f("restarted again while it restarts", 20, 50, at(20, Restart), at(30, Restart))
	f("joined again, and left", 20, 95, at(20, Restart), at(25, Leave), at(39, Join), at(39, Leave))
	f("joined again", 20, 30, at(20, Restart), at(25, Leave), at(30, Join))
}

func TestFreeze(t *testing.T) {
	freeze := Change{At: 100 * time.Second, Backend: 1, Kind: Freeze, Away: time.Minute}
	_, sum := mustPlay(t, &Scenario{Backends: 4, Policy: "round-robin", Workload: HotPrompts(1, 20), Changes: []Change{freeze}})
	inFlight := sum.Timeline.InFlight[1]
	if inFlight[105] == 0 || inFlight[155] != inFlight[110] {
		t.Errorf("frozen for a minute, the replica has %.0f in flight after 5 s, %.0f after 10 and %.0f after 55", inFlight[105], inFlight[110],
			inFlight[155])
	}
	if before, after := inFlight[90], inFlight[190]; after < before/2 {
		t.Errorf("half a minute after it continues it has %.1f in flight, and %.1f before", after, before)
	}
}

func TestExternalLoad(t *testing.T) {
	work := HotPrompts(1, 4)
	work.For = 100 * time.Second
	alone := &Scenario{Backends: 2, Engine: linear, Policy: "random", Workload: work}
	_, quiet := mustPlay(t, alone)
	shared := *alone
	shared.External = []ExternalLoad{{Backends: []int{1}, Rate: 0.5, Prompt: 8000, Output: 100}}
	_, loud := mustPlay(t, &shared)
	if loud.Requests != quiet.Requests || loud.PromptTokens != quiet.PromptTokens {
		t.Errorf("%d requests of %d tokens beside an external client, %d of %d alone", loud.Requests, loud.PromptTokens, quiet.Requests,
			quiet.PromptTokens)
	}
	if loud.TTFTMean < 4*quiet.TTFTMean {
		t.Errorf("mean TTFT %.3f s beside an external client that prefills half of the time, %.3f alone", loud.TTFTMean, quiet.TTFTMean)
	}
}

// What a poll says goes through the router's own types, so the fields are
// compared with what the replica is known to have.
func TestReportedLoad(t *testing.T) {
	s := &Scenario{Backends: 1, Engine: linear, Policy: "prefix", KVTokens: 20_480, IndexFactor: 0.5,
		Workload: jobs{asks(0, 8192, 400, 1), asks(0, 9000, 400, 2)}}
	requests, err := s.Workload.Requests(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRun(s, requests)
	if err != nil {
		t.Fatal(err)
	}
	if l := r.fleet[0].backend.Load(); l == nil || l.CacheTokens != 10_240 {
		t.Fatalf("before the first request the router sees %+v, want a cache of half the true 20,480 tokens", l)
	}
	const during = 2200 * time.Millisecond // both prompts are in the cache
	r.events.push(event{at: during, kind: eventTick})
	for r.now < during {
		e := r.events.pop()
		r.now = e.at
		r.handleEvent(&e)
		r.applyDecisions()
	}
	// The first, which decodes by now, holds 17 of 40 blocks, the second 18.
	l := r.fleet[0].reportedLoad(wallTime(r.now), r.reportedFactor)
	if l.Running != 2 || l.Waiting != 0 || l.OwnInFlight != 2 || l.BlockSize != 512 ||
		l.KVCacheUsage != 35.0/40 || l.PromptTokens != 17_192 || !l.PolledAt.Equal(time.Unix(startUnix, 0).Add(r.now)) {
		t.Errorf("the replica reports %+v", l)
	}
}
