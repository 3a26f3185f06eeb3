package discovery

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"
)

const (
	// maxAbsences is in how many answers in a row an address is absent before it is dropped. Servers of names
	// with many addresses return different ones each time.
	maxAbsences = 3
	// emptyDelay is how long a name has had no address before it counts as empty.
	emptyDelay = time.Minute
)

// Addresses is what the lookups of a name have shown. It has no lock, clock or I/O. A lookup that failed, with
// another error than ErrNotFound, has no effect but State.Err.
type Addresses struct {
	max   int
	state State

	// absences counts the last answers in a row that do not have an address. It has the addresses in
	// state.Current and, while the name stands for one replica, those that it has replaced.
	absences      map[netip.AddrPort]int
	notFoundSince time.Time // zero: the last answer has an address, or there was none
}

// State is what is known about a name.
type State struct {
	// Current has the addresses of the last three answers, sorted; while not Several, that of the last answer.
	// Not to be modified.
	Current []netip.AddrPort

	Several bool  // the name stands for several replicas, each of which is a backend; once set, it stays
	Empty   bool  // the name has had no address for a minute; Current is what it was before
	Omitted int   // addresses of the last answer that are not used, because there are too many
	Err     error // of the last lookup; nil: it succeeded
}

// NewAddresses returns the Addresses of a name that was not looked up yet. maxAddresses bounds how many are used at
// once. several is whether the name stands for several replicas, even if it has one address.
func NewAddresses(maxAddresses int, several bool) *Addresses {
	return &Addresses{max: maxAddresses, state: State{Several: several}, absences: map[netip.AddrPort]int{}}
}

// SetMaxAddresses changes the bound, with effect from the next answer.
func (a *Addresses) SetMaxAddresses(n int) { a.max = n }

// State returns what is known after the last Record.
func (a *Addresses) State() State { return a.state }

// Record records the outcome of one lookup, and reports whether State has changed. One error in place of another
// is no change.
func (a *Addresses) Record(answer []netip.AddrPort, err error, now time.Time) (changed bool) {
	before := a.state
	a.state.Err = err
	switch {
	case err == nil && len(answer) > 0:
		a.recordAnswer(answer)
		a.state.Empty, a.notFoundSince = false, time.Time{}
	case err == nil || errors.Is(err, ErrNotFound):
		if a.notFoundSince.IsZero() {
			a.notFoundSince = now
		}
		a.state.Empty = now.Sub(a.notFoundSince) >= emptyDelay
	}
	return !slices.Equal(before.Current, a.state.Current) || before.Several != a.state.Several || before.Empty != a.state.Empty ||
		before.Omitted != a.state.Omitted || (before.Err == nil) != (err == nil)
}

// recordAnswer records the addresses that a lookup has found, at least one.
func (a *Addresses) recordAnswer(answer []netip.AddrPort) {
	answer = slices.Compact(slices.SortedFunc(slices.Values(answer), netip.AddrPort.Compare))
	// A container that was started again may have another address and is the same replica. Addresses that are there
	// together, or in turns, are several.
	hasReturned := slices.ContainsFunc(answer, func(addr netip.AddrPort) bool { return a.absences[addr] > 0 })
	a.state.Several = a.state.Several || len(answer) > 1 || hasReturned

	for addr := range a.absences {
		if a.absences[addr]++; a.absences[addr] == maxAbsences {
			delete(a.absences, addr)
		}
	}
	for _, addr := range answer {
		a.absences[addr] = 0
	}
	if a.state.Several {
		a.selectCurrent()
	} else {
		a.state.Current = answer
	}
}

// selectCurrent uses the addresses in absences: if there are too many, those that are used already, then the lowest.
func (a *Addresses) selectCurrent() {
	var current, others []netip.AddrPort
	for _, addr := range slices.SortedFunc(maps.Keys(a.absences), netip.AddrPort.Compare) {
		if _, used := slices.BinarySearchFunc(a.state.Current, addr, netip.AddrPort.Compare); used {
			current = append(current, addr)
		} else {
			others = append(others, addr)
		}
	}
	candidates := append(current, others...)
	n := min(len(candidates), a.max)
	for _, addr := range candidates[n:] {
		delete(a.absences, addr)
	}
	a.state.Current, a.state.Omitted = candidates[:n], len(candidates)-n
	slices.SortFunc(a.state.Current, netip.AddrPort.Compare)
}
