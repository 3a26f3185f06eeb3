package snapshot

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/responseindex"
)

const blockBytes = 256

// ask makes a request of n blocks, all of them different for each key.
func ask(fleet []*backends.Backend, key, n int) *router.Request {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return &router.Request{Backends: fleet, Blocks: blocks, Bytes: n * blockBytes, Sequences: 1, Streams: true}
}

func mustPick(t testing.TB, r *router.Router, req *router.Request) *router.Reservation {
	t.Helper()
	d, err := r.Pick(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// kept is a fleet with a Store, and what that logs.
type kept struct {
	*router.Router
	*Store
	fleet []*backends.Backend
	now   time.Time
	log   bytes.Buffer
}

func newKept(t testing.TB, n int) *kept {
	t.Helper()
	k := &kept{now: time.Unix(1000, 0)}
	for i := range n {
		b := &backends.Backend{Name: fmt.Sprintf("b%d", i), Slot: i, URL: &url.URL{Scheme: "http", Host: fmt.Sprintf("10.0.0.%d:8000", i)}}
		b.SetState(backends.Ready)
		k.fleet = append(k.fleet, b)
	}
	clock := func() time.Time { return k.now }
	var err error
	k.Router, err = router.New(router.Options{
		Settings: router.Settings{Policy: "prefix", PollInterval: time.Second},
		Backends: k.fleet, BlockBytes: blockBytes, IndexMaxBytes: 1 << 26, Now: clock, Rand: rand.NewPCG(1, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	k.Store = NewStore(k.Router, Options{BlockBytes: blockBytes, MaxBytes: 1 << 26, Now: clock,
		Log: slog.New(slog.NewTextHandler(&k.log, nil))})
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
	var depth []int
	for _, b := range k.Explain(*ask(k.fleet, key, n)).Backends {
		depth = append(depth, b.MatchedBlocks)
	}
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
		k.Store.ObserveLoad(b, &l)
	}
	for key := range 20 {
		mustPick(t, k.Router, ask(k.fleet[key%2:key%2+1], key, 5+key)).Release(router.Outcome{End: router.Completed, OutputTokens: 1})
	}
	return k
}

func TestRestoredBlocks(t *testing.T) {
	before := warm(t)
	data := before.write(t)
	after := newKept(t, 2)
	if err := after.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if got := after.matched(4, 9); !slices.Equal(got, []int{0, 0}) {
		t.Errorf("%v blocks are held before the first scrape", got)
	}
	l := began()
	after.Store.ObserveLoad(after.fleet[0], &l)
	if got := after.matched(4, 9); !slices.Equal(got, []int{9, 0}) {
		t.Errorf("after one backend's scrape %v blocks are held, want 9 and 0", got)
	}
	after.Store.ObserveLoad(after.fleet[1], &l)
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

func TestPendingBackendSurvivesSecondRestart(t *testing.T) {
	data := warm(t).write(t)
	l := began()
	for range 3 { // only the first backend is ever scraped
		k := newKept(t, 2)
		if err := k.ReadPending(bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		k.Store.ObserveLoad(k.fleet[0], &l)
		data = k.write(t)
	}
	k := newKept(t, 2)
	if err := k.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	k.Store.ObserveLoad(k.fleet[1], &l)
	if got := k.matched(5, 10); !slices.Equal(got, []int{0, 10}) {
		t.Errorf("%v blocks are held, want 0 and 10", got)
	}
}

// What was read is in memory until every backend was scraped, and some never are.
func TestPendingPartsAreCompacted(t *testing.T) {
	const n = 6
	before := newKept(t, n)
	l := began()
	for i, b := range before.fleet {
		before.Store.ObserveLoad(b, &l)
		for key := range 10 {
			mustPick(t, before.Router, ask(before.fleet[i:i+1], 100*i+key, 20)).Release(router.Outcome{End: router.Completed, OutputTokens: 1})
		}
	}
	data := before.write(t)
	after := newKept(t, n)
	if err := after.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	whole := after.pending[after.fleet[n-1].Address()]
	for i := range n - 1 {
		after.Store.ObserveLoad(after.fleet[i], &l)
	}
	p := after.pending[after.fleet[n-1].Address()]
	if after.keptBytes != len(p.raw) || cap(p.raw) > len(data)/2 || &p.raw[0] == &whole.raw[0] {
		t.Errorf("%d bytes are kept of %d, for a part of %d", after.keptBytes, len(data), len(p.raw))
	}
	for _, piece := range [][2][]byte{{p.raw, whole.raw}, {p.list, whole.list}, {p.estimates, whole.estimates}} {
		if !bytes.Equal(piece[0], piece[1]) || &piece[0][0] == &piece[1][0] {
			t.Errorf("a copy shares memory, or differs: %x of %x", piece[0], piece[1])
		}
	}
	data = after.write(t)
	last := newKept(t, n)
	if err := last.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	last.Store.ObserveLoad(last.fleet[n-1], &l)
	if got := last.matched(100*(n-1)+3, 20); got[n-1] != 20 {
		t.Errorf("%v blocks are held, want 20 by the last", got)
	}

	// Of a file whose other backends were removed as little stays.
	fewer := newKept(t, 1)
	if err := fewer.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if p := fewer.pending[fewer.fleet[0].Address()]; fewer.keptBytes != len(p.raw) {
		t.Errorf("%d bytes are kept for a part of %d", fewer.keptBytes, len(p.raw))
	}
}

func TestMismatch(t *testing.T) {
	f := func(want string, then, now func(*backends.Load)) {
		t.Helper()
		p := part{takenAt: time.Unix(1000, 0), load: began()}
		then(&p.load)
		l := began()
		now(&l)
		if got := p.mismatchReason(&l); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	same := func(*backends.Load) {}
	noStart := func(l *backends.Load) { l.StartTime = 0 }
	f("", same, same)
	f("restarted", same, func(l *backends.Load) { l.StartTime = 950 })
	f("restarted", same, func(l *backends.Load) { l.StartTime = 1001 })
	f("", noStart, same)
	f("restarted", noStart, func(l *backends.Load) { l.StartTime = 1001 })
	// The clock of the replica's machine may be ahead of ours.
	ahead := func(l *backends.Load) { l.StartTime = 5000 }
	f("", ahead, ahead)

	f("", noStart, noStart)
	f("", same, noStart)
	f("cannot tell", noStart, func(l *backends.Load) { l.StartTime, l.TokensKnown = 0, false })
	f("cannot tell", func(l *backends.Load) { *l = backends.Load{CacheTokens: 64_000} }, noStart)
	f("decreased", noStart, func(l *backends.Load) { l.StartTime, l.PromptTokens = 0, 4999 })
	f("decreased", same, func(l *backends.Load) { l.GenerationTokens = 1 })

	f("asleep", same, func(l *backends.Load) { l.Asleep = true })
	f("caching is off", same, func(l *backends.Load) { l.PrefixCachingOff = true })
	f("from 64000 to 32000", same, func(l *backends.Load) { l.CacheTokens = 32_000 })
	f("", same, func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9, 1e9-66_000+1 })
	f("computed more", same, func(l *backends.Load) { l.PrefixQueries, l.PrefixHits = 1e9, 1e9-66_000-1 })
}

func TestMismatchedPartIsLoggedAndIgnored(t *testing.T) {
	k := newKept(t, 2)
	if err := k.ReadPending(bytes.NewReader(warm(t).write(t))); err != nil {
		t.Fatal(err)
	}
	l := began()
	l.StartTime = 990
	k.Store.ObserveLoad(k.fleet[0], &l)
	if got := k.matched(4, 9); !slices.Equal(got, []int{0, 0}) {
		t.Errorf("%v blocks are held by a replica that restarted", got)
	}
	if log := k.log.String(); !strings.Contains(log, "level=WARN") || !strings.Contains(log, "restarted") ||
		!strings.Contains(log, "backend=b0") {
		t.Errorf("the log says\n%s", log)
	}
}

// Requests are decided, and caches lost, while snapshots are written.
func TestWriteUnderTraffic(t *testing.T) {
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
				mustPick(t, k.Router, ask(k.fleet, i%60, 10+i%40)).Release(router.Outcome{End: router.End(i % 4), OutputTokens: 1})
				if i%100 == g {
					k.ForgetCache(k.fleet[g])
				}
			}
		})
	}
	for range 30 {
		after := newKept(t, 2)
		if err := after.ReadPending(bytes.NewReader(k.write(t))); err != nil {
			t.Error(err)
		}
		for _, b := range after.fleet {
			l := began()
			after.Store.ObserveLoad(b, &l)
		}
	}
	close(stop)
	traffic.Wait()
}

// A Write while backends come and go has only what is there, and a slot's next
// owner is never written under the address of the one before.
func TestWriteFollowsTheFleet(t *testing.T) {
	k := newKept(t, 3)
	l := backends.Load{StartTime: 5, CacheTokens: 100_000, PolledAt: k.now}
	for i, b := range k.fleet {
		k.Store.ObserveLoad(b, &l)
		mustPick(t, k.Router, ask(k.fleet[i:i+1], i, 20)).Release(router.Outcome{End: router.Completed})
	}
	k.RemoveBackend(k.fleet[1])
	k.ForgetBackend(k.fleet[1])
	next := &backends.Backend{Name: "next", Slot: 1, URL: &url.URL{Scheme: "http", Host: "10.0.1.1:8000"}}
	next.SetState(backends.Ready)
	k.AddBackend(next)
	k.Store.ObserveLoad(next, &l)
	mustPick(t, k.Router, ask([]*backends.Backend{next}, 7, 20)).Release(router.Outcome{End: router.Completed})
	data := k.write(t)
	parts, err := parseAll(data, HashingFingerprint(blockBytes), k.now)
	if err != nil {
		t.Fatal(err)
	}
	if len(parts) != 3 || parts[backends.NormalizeURL(k.fleet[1].URL)] != nil || len(k.lastLoads) != 3 {
		t.Errorf("%d parts, %d loads known", len(parts), len(k.lastLoads))
	}
	after := newKept(t, 2)
	after.fleet[1].URL = next.URL
	if err := after.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	for _, b := range after.fleet {
		after.Store.ObserveLoad(b, &l)
	}
	if got := after.matched(7, 20); got[1] != 20 {
		t.Errorf("%v blocks are held, want 20 by the second", got)
	}
	if got := after.matched(1, 20); got[1] != 0 {
		t.Errorf("%v blocks are held of what the slot's first owner had", got)
	}
}

// The ranks of a server are known after its first poll only.
func TestRanksAreRestored(t *testing.T) {
	addRank := func(k *kept) *backends.Backend {
		rank := backends.NewRank(k.fleet[0], 3, 3)
		rank.Slot = 1
		k.AddBackend(rank)
		return rank
	}
	k := newKept(t, 1)
	l := began()
	rank := addRank(k)
	k.Store.ObserveLoad(rank, &l)
	mustPick(t, k.Router, ask([]*backends.Backend{rank}, 7, 20)).Release(router.Outcome{End: router.Completed})
	data := k.write(t)
	for _, isPolled := range []bool{false, true} {
		k = newKept(t, 1)
		if err := k.ReadPending(bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		if isPolled {
			rank = addRank(k)
			k.Store.ObserveLoad(rank, &l)
		}
		data = k.write(t)
	}
	if got := k.matched(7, 20); !slices.Equal(got, []int{0, 20}) {
		t.Errorf("server and rank hold %v blocks, want 0 and 20", got)
	}
	k = newKept(t, 1)
	if err := k.ReadPending(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if k.ForgetBackend(k.fleet[0]); len(k.pending) != 0 {
		t.Errorf("%d parts of a removed server are kept", len(k.pending))
	}
}

// parseAll returns the parts of a snapshot by address.
func parseAll(data []byte, fingerprint uint64, now time.Time) (map[string]*part, error) {
	f, err := parseFrame(data)
	if err != nil {
		return nil, err
	}
	return f.parseParts(fingerprint, now)
}

// sealed gives data a checksum that fits.
func sealed(data []byte) []byte {
	var out bytes.Buffer
	w := writer{to: &out, sum: xxh3.New()}
	w.write(data[:len(data)-8])
	if err := w.writeChecksum(); err != nil {
		panic(err)
	}
	return out.Bytes()
}

func TestReadRejectsUnusableSnapshots(t *testing.T) {
	good := warm(t).write(t)
	f := func(name, want string, data []byte, change func(*kept)) {
		t.Helper()
		k := newKept(t, 2)
		change(k)
		err := k.ReadPending(bytes.NewReader(data))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
		for _, p := range k.pending {
			if p != nil {
				t.Errorf("%s: something of it is kept", name)
			}
		}
	}
	plain := func(*kept) {}
	edit := func(change func([]byte)) []byte {
		b := bytes.Clone(good)
		change(b)
		return b
	}
	f("empty", "truncated", nil, plain)
	f("another format", "not a warmroute snapshot", []byte(strings.Repeat("# a readme\n", 50)), plain)
	f("version", "version 4", edit(func(b []byte) { b[len(magic)] = 4 }), plain)
	f("other block size", "index.block_bytes", good, func(k *kept) { k.fingerprint = HashingFingerprint(512) })
	f("too old", "25h", good, func(k *kept) { k.now = k.now.Add(25 * time.Hour) })
	f("too large", "index.max_bytes", good, func(k *kept) { k.options.MaxBytes = int64(len(good)) - 1 })
	f("one part too many", "truncated", sealed(edit(func(b []byte) { b[len(magic)+12]++ })), plain)
	f("one part too few", "data after", sealed(edit(func(b []byte) { b[len(magic)+12]-- })), plain)
	for n := range good[:len(good)-1] {
		f(fmt.Sprintf("cut after %d bytes", n), "", good[:n], plain)
	}
	for n := range good {
		f(fmt.Sprintf("byte %d is another", n), "", edit(func(b []byte) { b[n] ^= 0x10 }), plain)
	}
}

// Responses do not depend on how prompts are hashed.
func TestResponsesSurviveARestart(t *testing.T) {
	settings := responseindex.Settings{MaxEntries: 10, TTL: time.Hour}
	before := warm(t)
	before.options.Responses = responseindex.New(settings, func() time.Time { return before.now }, nil)
	want := responseindex.Entry{Backend: "http://10.0.0.1:8000", Owner: "alice"}
	before.options.Responses.Add("resp_1", want)
	data := before.write(t)
	for _, c := range []struct {
		name, err string
		change    func(*kept)
	}{
		{"", "", func(*kept) {}},
		{"another block size", "index.block_bytes", func(k *kept) { k.fingerprint++ }},
		{"an index of less than the responses", "", func(k *kept) { k.options.MaxBytes = int64(len(data)) - 20 }},
	} {
		after := newKept(t, 2)
		after.options.Responses = responseindex.New(settings, func() time.Time { return after.now }, nil)
		c.change(after)
		if err := after.ReadPending(bytes.NewReader(data)); (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: error %v", c.name, err)
		}
		if got, _ := after.options.Responses.Find("resp_1"); got != want {
			t.Errorf("%s: restored %+v", c.name, got)
		}
	}
}

func TestFingerprintDependsOnBlockBytes(t *testing.T) {
	if HashingFingerprint(256) == HashingFingerprint(512) {
		t.Error("fingerprints do not tell block sizes apart")
	}
}

// A snapshot that was written earlier stays readable. One of another format needs another formatVersion.
func TestGoldenSnapshot(t *testing.T) {
	data, err := os.ReadFile("testdata/snapshot")
	if err != nil {
		t.Fatal(err)
	}
	parts, err := parseAll(data, fingerprintIn(data), time.Unix(1000, 0))
	if err != nil {
		t.Fatal(err)
	}
	p := parts["http://10.0.0.1:8000"]
	if len(parts) != 2 || p == nil || p.load.StartTime != 900 || p.load.PrefixHits != 3000 || !p.takenAt.Equal(time.Unix(1000, 0)) {
		t.Fatalf("got %d parts, %+v", len(parts), p)
	}
	f := estimate.New(blockBytes, 1)
	f.Grow(1)
	if fresh := f.OutputTokens(0); !f.RestoreBackend(0, p.estimates) || f.OutputTokens(0) >= fresh {
		t.Errorf("outputs of %.0f tokens, where all had one", f.OutputTokens(0))
	}
	for name, p := range map[string]*part{"as read": p, "in the present format": p.clone()} {
		x := index.New(1, 1<<20)
		x.SetRequestedCapacity(0, 10_000)
		x.Import(0, p.count).Add(p.decodeBlocks())
		depth := []int{0}
		if x.Match(ask(nil, 7, 12).Blocks, depth); depth[0] != 12 || p.count != 150 {
			t.Errorf("%s: %d of 12 blocks of a prompt found among %d", name, depth[0], p.count)
		}
	}
}

// fingerprintIn is the one that a snapshot carries.
func fingerprintIn(data []byte) uint64 {
	if len(data) < headBytes {
		return 0
	}
	at := len(magic) + 4
	var f uint64
	for i, b := range data[at : at+8] {
		f |= uint64(b) << (8 * i)
	}
	return f
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(magic))
	for _, k := range []*kept{newKept(f, 0), newKept(f, 3), warm(f)} {
		data := k.write(f)
		f.Add(data[:len(data)-8])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = sealed(append(bytes.Clone(data), make([]byte, 8)...)) // what lies behind the checksum is to be reached
		parts, err := parseAll(data, fingerprintIn(data), time.Unix(1000, 0))
		if err != nil {
			return
		}
		for _, p := range parts {
			l := began()
			_ = p.mismatchReason(&l)
			estimates := estimate.New(blockBytes, 1)
			estimates.Grow(1)
			estimates.RestoreBackend(0, p.estimates)
			blocks := p.decodeBlocks()
			x := index.New(1, 1<<20)
			x.SetRequestedCapacity(0, 100)
			if n, _ := x.Import(0, len(blocks)).Add(blocks); n != x.Len(0) || n > 100 {
				t.Errorf("%d blocks taken, %d held", n, x.Len(0))
			}
		}
	})
}

func TestRestoredEstimates(t *testing.T) {
	before := warm(t)
	for key := range 200 { // dense text, long outputs, and a cache that holds less than it says
		d := mustPick(t, before.Router, ask(before.fleet[:1], key%10, 60))
		d.Release(router.Outcome{End: router.Completed, OutputTokens: 700, PromptTokens: 60 * 256 / 3, CachedKnown: true})
	}
	want, fresh := before.Estimates(), newKept(t, 2).Estimates()
	if want[0].BytesPerToken == fresh[0].BytesPerToken || want[0].OutputTokens == fresh[0].OutputTokens ||
		want[0].CapacityFactor == fresh[0].CapacityFactor {
		t.Fatalf("nothing was learned: %+v", want[0])
	}
	after := newKept(t, 2)
	if err := after.ReadPending(bytes.NewReader(before.write(t))); err != nil {
		t.Fatal(err)
	}
	l := began()
	for _, b := range after.fleet {
		after.Store.ObserveLoad(b, &l)
	}
	for slot, got := range after.Estimates() {
		if got.BytesPerToken != want[slot].BytesPerToken || got.OutputTokens != want[slot].OutputTokens ||
			got.CapacityFactor != want[slot].CapacityFactor || got.PrefillRate != want[slot].PrefillRate {
			t.Errorf("backend %d: %+v, want %+v", slot, got, want[slot])
		}
	}
	parts, _ := after.Router.IndexStats()
	if had, _ := before.Router.IndexStats(); parts[0].Capacity < had[0].Capacity*63/64 || parts[0].Capacity > had[0].Capacity*65/64 {
		t.Errorf("capacity %d, want about %d", parts[0].Capacity, had[0].Capacity)
	}
}

// TestCheckpointsInParts checks that checkpoints are written with their blocks and read again.
func TestCheckpointsInParts(t *testing.T) {
	copied := []index.ExportedBlock{{}, {Block: 1, Used: 5}, {Block: 2, Parent: 1, ParentPlace: 1, Used: 5, Checkpoint: 1088},
		{Block: 3, Parent: 2, ParentPlace: 2, Used: 4}}
	written := part{address: "http://10.0.0.1:8000", takenAt: time.Unix(1000, 0), estimates: make([]byte, estimate.EncodedBytes)}
	p, err := parsePart(written.appendTo(nil, copied), formatVersion)
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]*part{"as read": p, "cloned": p.clone()} {
		var checkpoints []int
		for _, b := range p.decodeBlocks() {
			checkpoints = append(checkpoints, b.Checkpoint)
		}
		if !slices.Equal(checkpoints, []int{0, 1088, 0}) {
			t.Errorf("%s: checkpoints after %d tokens", name, checkpoints)
		}
	}
}
