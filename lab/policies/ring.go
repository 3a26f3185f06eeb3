package policies

import (
	"cmp"
	"iter"
	"slices"

	"warmroute/router/policy"
)

const (
	virtualNodes   = 256  // points of a backend on the ring
	maxRingMembers = 4096 // backends that a ring remembers, present or not
	oddGolden      = 0x9e3779b97f4a7c15
)

// ring is a consistent hash ring of backends. Absent backends keep their points,
// so that adding or removing one moves no key of another.
type ring struct {
	points  []point // by position
	members map[uint64]int32
	present []int32 // scratch, by member: index of the candidate + 1; 0: absent
}

type point struct {
	position uint64
	member   int32
}

// clockwise yields candidates in the order of their points from a position on,
// each as often as it has points, once around the ring.
func (g *ring) clockwise(position uint64, candidates []policy.Candidate) iter.Seq[int] {
	g.setCandidates(candidates)
	from, _ := slices.BinarySearchFunc(g.points, position, func(p point, x uint64) int { return cmp.Compare(p.position, x) })
	return func(yield func(int) bool) {
		for k := range g.points {
			p := g.points[(from+k)%len(g.points)]
			if i := g.present[p.member]; i != 0 && !yield(int(i-1)) {
				return
			}
		}
	}
}

// setCandidates sets which members are present, and adds the backends that are new.
func (g *ring) setCandidates(candidates []policy.Candidate) {
	unknown := 0
	for i := range candidates {
		if _, known := g.members[candidates[i].NameHash]; !known {
			unknown++
		}
	}
	if unknown > 0 {
		g.addNewMembers(candidates, unknown)
	}
	clear(g.present)
	for i := range candidates {
		g.present[g.members[candidates[i].NameHash]] = int32(i + 1)
	}
}

// addNewMembers adds the candidates that are not members, newCount of them. Where the
// ring would get too large, it forgets all others.
func (g *ring) addNewMembers(candidates []policy.Candidate, newCount int) {
	if g.members == nil || len(g.members)+newCount > maxRingMembers {
		*g = ring{members: map[uint64]int32{}}
	}
	for i := range candidates {
		name := candidates[i].NameHash
		if _, known := g.members[name]; known {
			continue
		}
		m := int32(len(g.members))
		g.members[name] = m
		for n := range uint64(virtualNodes) {
			g.points = append(g.points, point{policy.RendezvousRank((n+1)*oddGolden, name), m})
		}
	}
	g.present = make([]int32, len(g.members))
	slices.SortFunc(g.points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.position, b.position), cmp.Compare(a.member, b.member))
	})
}
