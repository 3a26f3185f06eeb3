package policy

import (
	"cmp"
	"iter"
	"slices"
)

const (
	virtualNodes = 256  // points of a backend on the ring
	mostMembers  = 4096 // backends that a ring remembers, here now or not
	oddGolden    = 0x9e3779b97f4a7c15
)

// ring is a consistent hash ring of backends. Those that are away keep their
// points, so that coming and going moves no other backend's keys.
type ring struct {
	points  []point // by at
	members map[uint64]int32
	place   []int32 // scratch, by member: place in candidates + 1; 0 is away
}

type point struct {
	at     uint64
	member int32
}

// clockwise yields candidates in the order of their points from at on, each as
// often as it has points, all the way round.
func (g *ring) clockwise(at uint64, candidates []Candidate) iter.Seq[int] {
	g.seat(candidates)
	from, _ := slices.BinarySearchFunc(g.points, at, func(p point, at uint64) int { return cmp.Compare(p.at, at) })
	return func(yield func(int) bool) {
		for k := range g.points {
			p := g.points[(from+k)%len(g.points)]
			if place := g.place[p.member]; place != 0 && !yield(int(place-1)) {
				return
			}
		}
	}
}

// seat fills place, and gives points to backends that have none.
func (g *ring) seat(candidates []Candidate) {
	unknown := 0
	for i := range candidates {
		if _, known := g.members[candidates[i].NameHash]; !known {
			unknown++
		}
	}
	if unknown > 0 {
		g.join(candidates, unknown)
	}
	clear(g.place)
	for i := range candidates {
		g.place[g.members[candidates[i].NameHash]] = int32(i + 1)
	}
}

func (g *ring) join(candidates []Candidate, unknown int) {
	if g.members == nil || len(g.members)+unknown > mostMembers {
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
			g.points = append(g.points, point{rendezvous((n+1)*oddGolden, name), m})
		}
	}
	g.place = make([]int32, len(g.members))
	slices.SortFunc(g.points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.member, b.member))
	})
}
