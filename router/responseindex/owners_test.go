package responseindex

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// One owner does not take the places of others, however many responses it makes.
func TestEvictionByOwner(t *testing.T) {
	for name, add := range map[string]func(x *Index, id string, e Entry){"own": (*Index).Add, "of a peer": (*Index).AddOfPeer} {
		x, _ := newTestIndex(10)
		for i := range 3 {
			add(x, fmt.Sprint("alice", i), Entry{"a", "alice"})
		}
		for i := range 100 {
			add(x, fmt.Sprint("bob", i), Entry{"b", "bob"})
		}
		restored, _ := newTestIndex(8)
		if err := restored.Restore(x.AppendTo(nil)); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			if found(x, fmt.Sprint("alice", i)) == "" || found(restored, fmt.Sprint("alice", i)) == "" {
				t.Errorf("%s: alice%d was evicted", name, i)
			}
		}
		if x.Len() != 10 || restored.Len() != 8 || found(x, "bob92") != "" || found(x, "bob93") == "" || found(restored, "bob94") != "" ||
			found(restored, "bob95") == "" {
			t.Errorf("%s: %d entries, %d restored ones", name, x.Len(), restored.Len())
		}
	}
}

// naiveIndex says what an Index has to hold.
type naiveIndex struct {
	maxEntries int
	entries    []listedEntry // the least recently used first
}

type listedEntry struct {
	id string
	Entry
}

func (n *naiveIndex) indexOf(id string) int {
	return slices.IndexFunc(n.entries, func(e listedEntry) bool { return e.id == id })
}

func (n *naiveIndex) remove(id string) {
	n.entries = slices.DeleteFunc(n.entries, func(e listedEntry) bool { return e.id == id })
}

func (n *naiveIndex) use(id string) {
	if i := n.indexOf(id); i >= 0 {
		e := n.entries[i]
		n.entries = append(slices.Delete(n.entries, i, i+1), e)
	}
}

func (n *naiveIndex) add(id string, e Entry) {
	if i := n.indexOf(id); i >= 0 && n.entries[i].Owner != e.Owner {
		return
	}
	n.remove(id)
	n.entries = append(n.entries, listedEntry{id, e})
	n.evict()
}

func (n *naiveIndex) evict() {
	for len(n.entries) > n.maxEntries {
		counts := map[string]int{}
		most := 0
		for _, e := range n.entries {
			counts[e.Owner]++
			most = max(most, counts[e.Owner])
		}
		victim := slices.IndexFunc(n.entries, func(e listedEntry) bool { return counts[e.Owner] == most })
		n.entries = slices.Delete(n.entries, victim, victim+1)
	}
}

func TestEvictionMatchesNaiveIndex(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		want := naiveIndex{maxEntries: 1 + random.IntN(30)}
		x, c := newTestIndex(want.maxEntries)
		for step := range 400 {
			id := fmt.Sprint("resp_", random.IntN(60))
			e := Entry{Backend: fmt.Sprint(random.IntN(3)), Owner: []string{"", "a", "a", "a", "b", "c"}[random.IntN(6)]}
			switch random.IntN(20) {
			case 0:
				x.Remove(id)
				want.remove(id)
			case 1, 2:
				x.RecordUse(id)
				want.use(id)
			case 3:
				want.maxEntries = 1 + random.IntN(30)
				x.Configure(Settings{MaxEntries: want.maxEntries, TTL: time.Hour})
				want.evict()
			case 4:
				restored, _ := newTestIndex(want.maxEntries)
				if err := restored.Restore(x.AppendTo(nil)); err != nil {
					t.Fatal(err)
				}
				x = restored
			case 5, 6, 7:
				x.AddOfPeer(id, e)
				want.add(id, e)
			default:
				x.Add(id, e)
				want.add(id, e)
			}
			var got []listedEntry
			for _, r := range x.list() {
				got = append(got, listedEntry{r.id, r.Entry})
			}
			if !slices.Equal(got, want.entries) {
				t.Fatalf("step %d: got %v\nwant %v", step, got, want.entries)
			}
			c.Time = c.Add(time.Millisecond)
		}
	}
}

// What is too long to be written lacks entries of the owner with the most.
func TestSizeLimitByOwner(t *testing.T) {
	x, _ := newTestIndex(100)
	x.Add("alice", Entry{"a", "alice"})
	for i := range 20 {
		x.Add(fmt.Sprintf("bob%02d", i), Entry{"b", "bob"})
	}
	var ids []string
	for _, r := range limitSize(x.list(), 4*(len("alice")+24)) {
		ids = append(ids, r.id)
	}
	if want := []string{"alice", "bob17", "bob18", "bob19"}; !slices.Equal(ids, want) {
		t.Errorf("kept %v, want %v", ids, want)
	}
}

func BenchmarkAddToFullIndex(b *testing.B) {
	x, _ := newTestIndex(100_000)
	owners := make([]string, 1000)
	for i := range owners {
		owners[i] = fmt.Sprint("key", i)
	}
	ids := make([]string, 200_000)
	for i := range ids {
		ids[i] = fmt.Sprintf("resp_%032d", i)
		x.Add(ids[i], Entry{"http://10.0.0.1:8000", owners[i%len(owners)]})
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		x.Add(ids[i%len(ids)], Entry{"http://10.0.0.1:8000", owners[i%len(owners)]})
	}
}
