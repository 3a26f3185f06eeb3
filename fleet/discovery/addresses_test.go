package discovery

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func addrs(names string) (list []netip.AddrPort) {
	for _, name := range strings.Fields(names) {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, name[0]}), 8000))
	}
	return list
}

func names(list []netip.AddrPort) string {
	text := ""
	for _, a := range list {
		text += " " + string(rune(a.Addr().As4()[3]))
	}
	return strings.TrimSpace(text)
}

var errServer = errors.New("server misbehaving")

// TestAddresses records answers, one each second. An answer is a list of addresses, "-" for ErrNotFound, "!" for a
// failed lookup, or "N*" and one of these for N of them. want has the addresses in use after each, with "+" before
// them if they are several, "0" if the name is empty, and "(N)" after them if N are omitted.
func TestAddresses(t *testing.T) {
	for _, c := range []struct {
		name    string
		several bool
		answers string
		want    string
	}{
		{"one address", false, "a/a/a", "a/a/a"},
		{"nothing known", false, "!/-", "/"},
		{"one address, several replicas", true, "a/a", "+a/+a"},
		{"order and duplicates", false, "b a b", "+a b"},
		{"another address in its place", false, "a/b/b/b/b", "a/b/b/b/b"},
		{"a restart after another", false, "a/b/c/d", "a/b/c/d"},
		{"the previous address returns", false, "a/b/a", "a/b/+a b"},
		{"it returns after two answers", false, "a/b/b/a", "a/b/b/+a b"},
		{"it returns after three answers", false, "a/b/b/b/a", "a/b/b/b/a"},
		{"failures are no answers", false, "a/b/!/-/!/b/a", "a/b/b/b/b/b/+a b"},
		{"one of three in turns", false, "a/b/c/a", "a/b/c/+a b c"},
		{"two at once", false, "a/a b", "a/+a b"},
		{"two at once instead", false, "a/b c/b c/b c", "a/+a b c/+a b c/+b c"},
		{"several stay several", false, "a b/a/a/a/a", "+a b/+a b/+a b/+a/+a"},
		{"absent in two answers", true, "a b/a/a/b/b/b/a b", "+a b/+a b/+a b/+a b/+a b/+b/+a b"},
		{"absences in a row", true, "a b/a/a/a b/a/a/a", "+a b/+a b/+a b/+a b/+a b/+a b/+a"},
		{"failures are no absences", true, "a b/a/a/3*!/3*-/a", "+a b/+a b/+a b/+a b/+a b/+a"},
		{"all replaced", true, "a b/c d/c d/c d", "+a b/+a b c d/+a b c d/+c d"},
		{"more than the bound", true, "a b c d e f", "+a b c d(2)"},
		{"those in use remain", true, "c d e/a b c d e/a b c d e", "+c d e/+a c d e(1)/+a c d e(1)"},
		{"an omitted one takes a place", true, "a b c d e/b c d e/b c d e/b c d e", "+a b c d(1)/+a b c d(1)/+a b c d(1)/+b c d e"},
		{"the bound when two are there", false, "z/a b c d e", "z/+a b c z(2)"},
		{"empty", false, "a/60*-/-/-", "a/a/0a/0a"},
		{"empty several", true, "a b/60*-/-/a/b/b/b", "+a b/+a b/0+a b/+a b/+a b/+a b/+b"},
		{"an answer ends the minute", false, "a/60*-/a/60*-/-", "a/a/a/a/0a"},
		{"failures alone are not empty", true, "a b/400*!", "+a b/+a b"},
		{"a failure does not fill the name", false, "a/61*-/!", "a/0a/0a"},
		{"never had an address", false, "61*-/a", "0/a"},
	} {
		a := NewAddresses(4, c.several)
		now := time.Unix(0, 0)
		var got []string
		for _, step := range strings.Split(c.answers, "/") {
			times := 1
			if before, after, found := strings.Cut(step, "*"); found {
				fmt.Sscan(before, &times)
				step = after
			}
			for range times {
				before := a.State()
				var answer []netip.AddrPort
				var err error
				switch step {
				case "-":
					err = fmt.Errorf("lookup: %w", ErrNotFound)
				case "!":
					err = errServer
				default:
					answer = addrs(step)
				}
				changed := a.Record(answer, err, now)
				after := a.State()
				if after.Err != err {
					t.Errorf("%s: got error %v, want %v", c.name, after.Err, err)
				}
				if text := stateText(after); changed != (text != stateText(before) || (before.Err == nil) != (err == nil)) {
					t.Errorf("%s: after %s: changed %v, from %s to %s", c.name, step, changed, stateText(before), text)
				}
				now = now.Add(time.Second)
			}
			got = append(got, stateText(a.State()))
		}
		if text := strings.Join(got, "/"); text != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, text, c.want)
		}
	}
}

func stateText(s State) string {
	text := ""
	if s.Empty {
		text += "0"
	}
	if s.Several {
		text += "+"
	}
	text += names(s.Current)
	if s.Omitted > 0 {
		text += fmt.Sprintf("(%d)", s.Omitted)
	}
	return text
}

func TestSetMaxAddresses(t *testing.T) {
	a := NewAddresses(4, true)
	for i, limit := range []int{4, 2, 3} {
		a.SetMaxAddresses(limit)
		a.Record(addrs("a b c d"), nil, time.Unix(int64(i), 0))
		if s := a.State(); len(s.Current) != limit || s.Omitted != 4-limit || s.Current[0] != addrs("a")[0] {
			t.Errorf("bound %d: got %s", limit, stateText(s))
		}
	}
}

// FuzzRecord records random answers. Each byte of a lookup has one of eight addresses as a bit; 0 is ErrNotFound. A
// byte before it is the time since the last one in seconds, and a failed lookup if it is above 200.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{1, 1, 1, 2, 1, 1}, uint8(4), false)
	f.Add([]byte{1, 255, 1, 3, 250, 0, 1, 96, 100, 0, 100, 0, 1, 7}, uint8(3), false)
	f.Add([]byte{1, 7, 1, 56, 1, 192, 1, 7, 1, 56, 1, 192}, uint8(8), true)
	f.Fuzz(func(t *testing.T, lookups []byte, bound uint8, several bool) {
		limit := int(bound%8) + 1
		a, twin, withoutFailures := NewAddresses(limit, several), NewAddresses(limit, several), NewAddresses(limit, several)
		now := time.Unix(0, 0)
		var answers [][]netip.AddrPort
		for ; len(lookups) >= 2; lookups = lookups[2:] {
			var answer []netip.AddrPort
			for i := range 8 {
				if lookups[1]&(1<<i) != 0 {
					answer = append(answer, addrs(string(rune('h'-i)))...)
				}
			}
			var err error
			switch {
			case lookups[0] > 200:
				answer, err = nil, errServer
			case len(answer) == 0:
				err = ErrNotFound
			default:
				answers = append(answers, answer)
			}
			if err != errServer {
				now = now.Add(time.Duration(lookups[0]) * time.Second)
				withoutFailures.Record(answer, err, now)
			}
			before := a.State()
			a.Record(answer, err, now)
			twin.Record(slices.Clone(answer), err, now)
			s := a.State()
			if !reflect.DeepEqual(a, twin) {
				t.Fatalf("two outcomes: %+v and %+v", a, twin)
			}
			s.Err = nil
			other := withoutFailures.State()
			if other.Err = nil; !reflect.DeepEqual(s, other) {
				t.Fatalf("a failed lookup has changed %+v to %+v", other, s)
			}
			if before.Several && !s.Several || several && !s.Several {
				t.Fatal("several replicas have become one")
			}
			if len(s.Current) > limit || !s.Several && len(s.Current) > 1 || len(a.absences) > max(limit, maxAbsences) {
				t.Fatalf("more than %d: %+v, %+v", limit, s, a.absences)
			}
			if !slices.IsSortedFunc(s.Current, netip.AddrPort.Compare) || len(slices.Compact(slices.Clone(s.Current))) != len(s.Current) {
				t.Fatalf("not sorted, or not unique: %v", s.Current)
			}
			recent := slices.Concat(answers[max(0, len(answers)-maxAbsences):]...)
			for _, addr := range s.Current {
				if !slices.Contains(recent, addr) {
					t.Fatalf("%v is in none of the last answers", addr)
				}
			}
			for _, addr := range before.Current {
				if s.Several && !slices.Contains(s.Current, addr) && slices.Contains(recent, addr) {
					t.Fatalf("%v was dropped, and is in one of the last answers", addr)
				}
			}
			if len(answers) > 0 && len(s.Current) == 0 {
				t.Fatal("no address is in use")
			}
			for _, addr := range answer {
				if len(s.Current) < limit && !slices.Contains(s.Current, addr) {
					t.Fatalf("%v is not used, and there is room", addr)
				}
			}
		}
	})
}
