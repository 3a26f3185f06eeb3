package router

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
)

// scratchFields hold nothing from one call to the next.
var scratchFields = []string{
	"router.fleet.scratch", "index.Index.prefetchSink", "index.Index.evictBuffer", "estimate.Estimates.scratch",
	"queue.InteractiveLoad.scratch",
	"policies.ring.present",
}

// stateReader reads a value with all that it refers to, by reflection.
type stateReader struct {
	values  map[string]string // by path
	visited map[pointerTo]bool
	queued  []func()
	skipped map[string]bool // of scratchFields
}

type pointerTo struct {
	address uintptr
	of      reflect.Type
}

// readState returns the values of all fields, elements and variables that are reachable from v, by
// their paths.
func readState(v any) *stateReader {
	s := &stateReader{values: map[string]string{}, visited: map[pointerTo]bool{}, skipped: map[string]bool{}}
	s.read("", reflect.ValueOf(v))
	for len(s.queued) > 0 {
		next := s.queued[0]
		s.queued = s.queued[1:]
		next()
	}
	return s
}

func (s *stateReader) read(path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		s.values[path] = hex(v.Pointer())
		key := pointerTo{v.Pointer(), v.Type()}
		if v.IsNil() || s.visited[key] || v.Type() == reflect.TypeFor[*time.Location]() {
			return
		}
		s.visited[key] = true
		s.queued = append(s.queued, func() { s.read(v.Type().String()+"@"+hex(key.address), v.Elem()) })
	case reflect.Interface:
		if v.IsNil() {
			s.values[path] = "nil"
			return
		}
		s.values[path] = v.Elem().Type().String()
		s.read(path+".("+v.Elem().Type().String()+")", v.Elem())
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[sync.Mutex]() {
			return
		}
		for i := range v.NumField() {
			field := v.Type().String() + "." + v.Type().Field(i).Name
			if slices.Contains(scratchFields, field) {
				s.skipped[field] = true
				continue
			}
			s.read(path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice, reflect.Array:
		s.values[path] = "len " + strconv.Itoa(v.Len())
		for i := range v.Len() {
			s.read(path+"["+strconv.Itoa(i)+"]", v.Index(i))
		}
	case reflect.Map:
		var keys []string
		for it := v.MapRange(); it.Next(); {
			key := leafState(it.Key())
			keys = append(keys, key)
			s.read(path+"["+key+"]", it.Value())
		}
		slices.Sort(keys)
		s.values[path] = fmt.Sprintf("%q", keys)
	default:
		s.values[path] = leafState(v)
	}
}

// leafState returns a value that refers to nothing else that is read.
func leafState(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Bool:
		return strconv.FormatBool(v.Bool())
	case reflect.String:
		return v.String()
	case reflect.Func, reflect.UnsafePointer, reflect.Pointer:
		return hex(v.Pointer())
	case reflect.Chan:
		return hex(v.Pointer()) + " with " + strconv.Itoa(v.Len())
	case reflect.Struct, reflect.Array:
		return fmt.Sprint(v)
	case reflect.Float32, reflect.Float64:
		return strconv.FormatUint(math.Float64bits(v.Float()), 16)
	}
	if v.CanInt() {
		return strconv.FormatInt(v.Int(), 10)
	}
	return strconv.FormatUint(v.Uint(), 10)
}

func hex(address uintptr) string { return strconv.FormatUint(uint64(address), 16) }

// changesSince returns which values differ from those read before. What was or is there only once
// is found by the length or the pointer that has changed with it.
func (s *stateReader) changesSince(before *stateReader) (changes []string) {
	for _, path := range slices.Sorted(maps.Keys(s.values)) {
		was, existed := before.values[path]
		if is := s.values[path]; existed && was != is {
			changes = append(changes, fmt.Sprintf("%s: was %q, is %q", path, was, is))
		}
	}
	return changes
}

// TestReadState expects of readState that it finds changes wherever they are.
func TestReadState(t *testing.T) {
	type part struct {
		n    int
		next *part
	}
	type whole struct {
		fraction float64
		parts    map[string]*part
		list     []part
		any      any
		lock     sync.Mutex
	}
	w := &whole{parts: map[string]*part{"a": {n: 1}}, list: make([]part, 2, 3), any: &part{}}
	w.parts["a"].next = w.parts["a"]
	for _, c := range []struct {
		name   string
		change func()
	}{
		{"a number", func() { w.fraction = math.Copysign(0, -1) }},
		{"a value of a map", func() { w.parts["a"].n++ }},
		{"a new key of a map", func() { w.parts["b"] = nil }},
		{"a replaced key of a map", func() { delete(w.parts, "b"); w.parts["c"] = nil }},
		{"an element", func() { w.list[1].n++ }},
		{"a length", func() { w.list = w.list[:3] }},
		{"a pointer in an interface", func() { w.any.(*part).next = new(part) }},
		{"a pointer to an equal value", func() { w.list[0].next = &part{n: 1} }},
		{"the type in an interface", func() { w.any = part{} }},
	} {
		before := readState(w)
		if changes := readState(w).changesSince(before); len(changes) > 0 {
			t.Errorf("%s: changes before it has changed: %q", c.name, changes)
		}
		if c.change(); len(readState(w).changesSince(before)) == 0 {
			t.Errorf("%s has changed, which was not found", c.name)
		}
	}
	before := readState(w)
	w.lock.Lock()
	defer w.lock.Unlock()
	if c := readState(w).changesSince(before); len(c) > 0 {
		t.Errorf("a lock is no state: %q", c)
	}
}

// busyFleet returns a fleet with requests in flight and in the queue. Any decision would count some of
// them as prefilled, and find the last backend stalled.
func busyFleet(t *testing.T, policy string) (*Router, []*backends.Backend) {
	t.Helper()
	r, fleet, c := newFleet(t, 7, policy, withQueue, func(o *Options) {
		o.IndexMaxBytes = 1 << 16
		o.Queue.LowPrioritySlowdown, o.Queue.BusyTimeout = 0.05, time.Hour
		o.Breaker = BreakerSettings{Failures: 3, OpenTime: time.Second}
		o.Reporter = &recordedEvents{}
	})
	const failing, full, stalled = 4, 5, 6
	for slot, b := range fleet {
		l := &backends.Load{
			TokensKnown: true, QueuesKnown: true, Running: 3 + slot, Waiting: slot, KVKnown: true, CacheTokens: 30_000,
			KVCacheUsage: 0.15 * float64(slot), PolledAt: c.now, MaxAdapters: 2,
		}
		b.SetLoad(l)
		r.ObserveLoad(b, l)
	}
	followers := followAll(r, fleet[:2])
	on := func(slot int, req *Request) *Reservation {
		t.Helper()
		req.Backends = fleet[slot : slot+1]
		return sent(t, fleet[slot].Name, submit(r, req))
	}
	for key := range 21 {
		slot := key % 7
		d := on(slot, turnOf(ask(fleet, key, 8), uint64(key+1), prompt.TurnFirst))
		d.RecordFirstEvent()
		c.advance(50 * time.Millisecond)
		d.Release(Outcome{End: Completed, OutputTokens: 30, PromptTokens: 8 * tokensPerBlock})
	}
	for _, f := range followers {
		f.settle()
	}
	fleet[3].SetOptions(backends.Options{MaxInFlight: 3, Weight: 2})
	on(stalled, ask(fleet, 32, 1)).RecordFirstEvent()
	fleet[stalled].SetLoad(nil) // its polls fail
	for range 3 {               // its breaker opens
		on(failing, ask(fleet, 30, 1)).Release(Outcome{End: NotProcessed, Failed: true})
	}
	sendWhole := func(slot, key int) {
		t.Helper()
		req := ask(fleet, key, 4)
		req.Streams, req.Adapter, req.Stalls = false, "sql", new(stallCalls)
		on(slot, req)
	}
	for slot := range fleet {
		sendWhole(slot, 40+slot)
	}
	r.ApplyPlacements(peerID, []PlacementEvent{{Kind: PlacementSent, Placement: Placement{
		ID: 1, Backend: fleet[1], Blocks: ask(fleet, 60, 10).Blocks, Bytes: 2560, PromptTokens: 640, UncachedTokens: 640, Sequences: 2,
		Streams: true,
	}}}, 0)
	c.advance(1700 * time.Millisecond)    // all responses that are not streamed should be prefilled
	for _, slot := range []int{0, 2, 3} { // as the peer's request keeps the backend between them
		on(slot, ask(fleet, 70+slot, 200))
	}
	for key := range 12 { // some of them wait
		req := ask(fleet[:4], 80+key, 40)
		req.Tenant, req.Priority = uint64(key%3), key%3-1
		submit(r, req)
	}
	c.advance(700 * time.Millisecond)
	beside := on(full, ask(fleet, 33, 1))
	beside.RecordFirstEvent()
	on(full, ask(fleet, 31, 1)).Release(refused)
	c.advance(300 * time.Millisecond)
	on(full, ask(fleet, 31, 1)).Release(refused) // it counts as full for a second now
	beside.Release(Outcome{End: ClientDisconnected})
	sendWhole(full, 50)
	c.advance(900 * time.Millisecond)
	return r, fleet
}

func TestExplainChangesNothing(t *testing.T) {
	for _, policy := range []string{"prefix", "skywalker", "lmetric", "round-robin", "chwbl", "sticky-least-loaded"} {
		t.Run(policy, func(t *testing.T) {
			r, fleet := busyFleet(t, policy)
			if r.CountPeerRequests() == 0 || r.Status(fleet[4]).Breaker != BreakerHalfOpen || r.kvFollower(fleet[0]) == nil {
				t.Fatalf("the fleet is not as it should be: %d requests of peers, breaker %v", r.CountPeerRequests(), r.Status(fleet[4]).Breaker)
			}
			if waiting := r.CountWaiting(); (waiting > 0) != r.fleet.policy.definition.UsesQueue {
				t.Fatalf("%d requests are queued", waiting)
			}
			before := readState(r)
			for _, field := range scratchFields {
				if !before.skipped[field] && (field != "policies.ring.present" || policy == "chwbl") {
					t.Errorf("there is no %s", field)
				}
			}
			for name, change := range map[string]func(*Request) (tried []*backends.Backend){
				"held by some":      func(*Request) []*backends.Backend { return nil },
				"new":               func(req *Request) []*backends.Backend { *req = *ask(fleet, 1000, 9); return nil },
				"low priority":      func(req *Request) []*backends.Backend { lowPriority(req); return nil },
				"tried":             func(*Request) []*backends.Backend { return fleet[:3] },
				"tried everywhere":  func(*Request) []*backends.Backend { return fleet },
				"no engine":         func(req *Request) []*backends.Backend { req.NoEngine = true; return nil },
				"adapter":           func(req *Request) []*backends.Backend { req.Adapter = "other"; return nil },
				"next turn":         func(req *Request) []*backends.Backend { turnOf(req, 2, prompt.TurnLater).Conversation = 2; return nil },
				"stored":            func(req *Request) []*backends.Backend { req.Stored, req.Backends = true, fleet[2:3]; return nil },
				"too long":          func(req *Request) []*backends.Backend { *req = *ask(fleet, 1001, 2000); return nil },
				"another model":     func(req *Request) []*backends.Backend { req.Model, req.CatalogID = "other", "other"; return nil },
				"on the stalled":    func(req *Request) []*backends.Backend { req.Backends = fleet[6:]; return nil },
				"on the failing":    func(req *Request) []*backends.Backend { req.Backends = fleet[4:5]; return nil },
				"many sequences":    func(req *Request) []*backends.Backend { req.Sequences, req.Streams = 5, false; return nil },
				"lacks an endpoint": func(req *Request) []*backends.Backend { req.Endpoint = 1; return nil },
			} {
				req := ask(fleet, 1, 12)
				tried := change(req)
				first := r.Explain(*req, tried...)
				if again := r.Explain(*req, tried...); !reflect.DeepEqual(first, again) {
					t.Errorf("%s: explained as %+v and then as %+v", name, first, again)
				}
			}
			if changes := readState(r).changesSince(before); len(changes) > 0 {
				t.Errorf("Explain changed %d values: %q", len(changes), changes[:min(len(changes), 10)])
			}
			r.RetryAfter(0) // it looks at the fleet as a decision does
			changed := readState(r).changesSince(before)
			for _, path := range []string{".prefill.pending:", ".stalled:"} {
				if !slices.ContainsFunc(changed, func(change string) bool { return strings.Contains(change, path) }) {
					t.Errorf("a decision does not change %s, so the fleet is not as it should be", path)
				}
			}
		})
	}
}
