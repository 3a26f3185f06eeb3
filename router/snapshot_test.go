package router

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
)

// kept is a fleet with Snapshots, and what they log.
type kept struct {
	*Router
	*Snapshots
	fleet []*backends.Backend
	clock *clock
	log   bytes.Buffer
}

func newKept(t testing.TB, n int) *kept {
	t.Helper()
	k := &kept{}
	k.Router, k.fleet, k.clock = newFleet(t, n, "prefix")
	for i, b := range k.fleet {
		b.URL = &url.URL{Scheme: "http", Host: fmt.Sprintf("10.0.0.%d:8000", i)}
	}
	k.Snapshots = NewSnapshots(k.Router, 1<<26, slog.New(slog.NewTextHandler(&k.log, nil)))
	return k
}

func (k *kept) write(t testing.TB) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := k.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// matched is how many of n blocks of prompt key each backend holds.
func (k *kept) matched(key, n int) []int {
	k.deciding.Lock()
	defer k.deciding.Unlock()
	depth := make([]int, len(k.fleet))
	k.index.Match(ask(k.fleet, key, n).Blocks, depth)
	return depth
}

// began is the first scrape of a replica that has run for a while.
func began() backends.Load {
	return backends.Load{
		StartTime: 900, CacheTokens: 64_000, PromptTokens: 5000, GenerationTokens: 700, TokensKnown: true,
		PrefixQueries: 5000, PrefixHits: 3000, PrefixKnown: true,
	}
}

// warm has prompts placed on its two backends: the even ones on the first.
func warm(t testing.TB) *kept {
	t.Helper()
	k := newKept(t, 2)
	l := began()
	for _, b := range k.fleet {
		k.Snapshots.ObserveLoad(b, &l)
	}
	for key := range 20 {
		mustPick(t, k.Router, ask(k.fleet[key%2:key%2+1], key, 5+key)).Release(Outcome{End: Completed, AnswerTokens: 1})
	}
	return k
}

func TestASnapshotGivesBackWhatBackendsHeld(t *testing.T) {
	before := warm(t)
	data := before.write(t)
	after := newKept(t, 2)
	if err := after.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if got := after.matched(4, 9); !slices.Equal(got, []int{0, 0}) {
		t.Errorf("%v blocks are held before the first scrape", got)
	}
	l := began()
	after.Snapshots.ObserveLoad(after.fleet[0], &l)
	if got := after.matched(4, 9); !slices.Equal(got, []int{9, 0}) {
		t.Errorf("after one backend's scrape %v blocks are held, want 9 and 0", got)
	}
	after.Snapshots.ObserveLoad(after.fleet[1], &l)
	for key := range 20 {
		want := before.matched(key, 5+key)
		if got := after.matched(key, 5+key); !slices.Equal(got, want) {
			t.Errorf("prompt %d: %v blocks are held, want %v", key, got, want)
		}
	}
	if log := after.log.String(); strings.Count(log, "index restored") != 2 {
		t.Errorf("the log says\n%s", log)
	}
}

func TestABackendThatIsAwayAtOneRestartIsNotForgottenAtTheNext(t *testing.T) {
	data := warm(t).write(t)
	l := began()
	for range 3 { // only the first backend is ever scraped
		k := newKept(t, 2)
		if err := k.Read(bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		k.Snapshots.ObserveLoad(k.fleet[0], &l)
		data = k.write(t)
	}
	k := newKept(t, 2)
	if err := k.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	k.Snapshots.ObserveLoad(k.fleet[1], &l)
	if got := k.matched(5, 10); !slices.Equal(got, []int{0, 10}) {
		t.Errorf("%v blocks are held, want 0 and 10", got)
	}
}

// What was read is in memory until every backend was scraped, and some never are.
func TestABackendThatStaysAwayKeepsNoMoreThanItsPartInMemory(t *testing.T) {
	const n = 6
	before := newKept(t, n)
	l := began()
	for i, b := range before.fleet {
		before.Snapshots.ObserveLoad(b, &l)
		for key := range 10 {
			mustPick(t, before.Router, ask(before.fleet[i:i+1], 100*i+key, 20)).Release(Outcome{End: Completed, AnswerTokens: 1})
		}
	}
	data := before.write(t)
	after := newKept(t, n)
	if err := after.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	whole := after.read[after.fleet[n-1]]
	for i := range n - 1 {
		after.Snapshots.ObserveLoad(after.fleet[i], &l)
	}
	p := after.read[after.fleet[n-1]]
	if after.kept != len(p.raw) || cap(p.raw) > len(data)/2 || &p.raw[0] == &whole.raw[0] {
		t.Errorf("%d bytes are kept of %d, for a part of %d", after.kept, len(data), len(p.raw))
	}
	for _, piece := range [][2][]byte{{p.raw, whole.raw}, {p.list, whole.list}, {p.lessons, whole.lessons}} {
		if !bytes.Equal(piece[0], piece[1]) || &piece[0][0] == &piece[1][0] {
			t.Errorf("a copy shares memory, or differs: %x of %x", piece[0], piece[1])
		}
	}
	data = after.write(t)
	last := newKept(t, n)
	if err := last.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	last.Snapshots.ObserveLoad(last.fleet[n-1], &l)
	if got := last.matched(100*(n-1)+3, 20); got[n-1] != 20 {
		t.Errorf("%v blocks are held, want 20 by the last", got)
	}

	// Of a file whose other backends were removed as little stays.
	fewer := newKept(t, 1)
	if err := fewer.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if p := fewer.read[fewer.fleet[0]]; fewer.kept != len(p.raw) {
		t.Errorf("%d bytes are kept for a part of %d", fewer.kept, len(p.raw))
	}
}

func TestWhatContradictsASnapshot(t *testing.T) {
	f := func(want string, then, now func(*backends.Load)) {
		t.Helper()
		p := part{taken: time.Unix(1000, 0), load: began()}
		then(&p.load)
		l := began()
		now(&l)
		if got := p.contradicted(&l); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	same := func(*backends.Load) {}
	noStart := func(l *backends.Load) { l.StartTime = 0 }
	f("", same, same)
	f("started anew", same, func(l *backends.Load) { l.StartTime = 950 })
	f("started anew", same, func(l *backends.Load) { l.StartTime = 1001 })
	f("", noStart, same)
	f("started anew", noStart, func(l *backends.Load) { l.StartTime = 1001 })
	// The clock of the replica's machine may be ahead of ours.
	ahead := func(l *backends.Load) { l.StartTime = 5000 }
	f("", ahead, ahead)

	f("", noStart, noStart)
	f("", same, noStart)
	f("nothing shows", noStart, func(l *backends.Load) { l.StartTime, l.TokensKnown = 0, false })
	f("nothing shows", func(l *backends.Load) { *l = backends.Load{CacheTokens: 64_000} }, noStart)
	f("ran backwards", noStart, func(l *backends.Load) { l.StartTime, l.PromptTokens = 0, 4999 })
	f("ran backwards", same, func(l *backends.Load) { l.GenerationTokens = 1 })

	f("asleep", same, func(l *backends.Load) { l.Asleep = true })
	f("no prefixes", same, func(l *backends.Load) { l.PrefixCachingOff = true })
	f("from 64000 to 32000", same, func(l *backends.Load) { l.CacheTokens = 32_000 })
	f("", same, func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9, 1e9-66_000+1 })
	f("computed more", same, func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9, 1e9-66_000-1 })
}

func TestAContradictedPartIsReportedAndNotUsed(t *testing.T) {
	k := newKept(t, 2)
	if err := k.Read(bytes.NewReader(warm(t).write(t))); err != nil {
		t.Fatal(err)
	}
	l := began()
	l.StartTime = 990
	k.Snapshots.ObserveLoad(k.fleet[0], &l)
	if got := k.matched(4, 9); !slices.Equal(got, []int{0, 0}) {
		t.Errorf("%v blocks are held by a replica that started anew", got)
	}
	if log := k.log.String(); !strings.Contains(log, "level=WARN") || !strings.Contains(log, "started anew") || !strings.Contains(log, "backend=b0") {
		t.Errorf("the log says\n%s", log)
	}
}

// Requests are decided, and caches lost, while snapshots are written.
func TestSnapshotsUnderTraffic(t *testing.T) {
	k := warm(t)
	stop := make(chan struct{})
	var traffic sync.WaitGroup
	for g := range 2 {
		traffic.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				mustPick(t, k.Router, ask(k.fleet, i%60, 10+i%40)).Release(Outcome{End: End(i % 4), AnswerTokens: 1})
				if i%100 == g {
					k.ForgetCache(k.fleet[g])
				}
			}
		})
	}
	for range 30 {
		after := newKept(t, 2)
		if err := after.Read(bytes.NewReader(k.write(t))); err != nil {
			t.Error(err)
		}
		for _, b := range after.fleet {
			l := began()
			after.Snapshots.ObserveLoad(b, &l)
		}
	}
	close(stop)
	traffic.Wait()
}

// A Write while backends come and go has only what is there, and a slot's next
// owner is never written under the address of the one before.
func TestASnapshotFollowsTheFleet(t *testing.T) {
	k := newKept(t, 3)
	l := backends.Load{StartTime: 5, CacheTokens: 100_000, ScrapedAt: k.clock.now}
	for i, b := range k.fleet {
		k.Snapshots.ObserveLoad(b, &l)
		mustPick(t, k.Router, ask(k.fleet[i:i+1], i, 20)).Release(Outcome{End: Completed})
	}
	k.RemoveBackend(k.fleet[1])
	k.ForgetBackend(k.fleet[1])
	next := &backends.Backend{Name: "next", Slot: 1, URL: &url.URL{Scheme: "http", Host: "10.0.1.1:8000"}}
	next.SetState(backends.Ready)
	k.AddBackend(next)
	k.Snapshots.ObserveLoad(next, &l)
	mustPick(t, k.Router, ask([]*backends.Backend{next}, 7, 20)).Release(Outcome{End: Completed})
	data := k.write(t)
	parts, err := parseSnapshot(data, fingerprint(k.Router.blockBytes), k.clock.now)
	if err != nil {
		t.Fatal(err)
	}
	if len(parts) != 3 || parts[backends.Address(k.fleet[1].URL)] != nil || len(k.known) != 3 {
		t.Errorf("%d parts, %d loads known", len(parts), len(k.known))
	}
	after := newKept(t, 2)
	after.fleet[1].URL = next.URL
	if err := after.Read(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	for _, b := range after.fleet {
		after.Snapshots.ObserveLoad(b, &l)
	}
	if got := after.matched(7, 20); got[1] != 20 {
		t.Errorf("%v blocks are held, want 20 by the second", got)
	}
	if got := after.matched(1, 20); got[1] != 0 {
		t.Errorf("%v blocks are held of what the slot's first owner had", got)
	}
}
