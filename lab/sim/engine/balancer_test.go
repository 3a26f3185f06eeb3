package engine

import (
	"slices"
	"testing"
	"time"
)

func TestBalancer(t *testing.T) {
	type load struct {
		running, waiting int
		kvBlocks         int // of 100, that the running ones have
	}
	for _, c := range []struct {
		name    string
		engines []load
		want    []int // engines of the requests that arrive at once
	}{
		{"idle engines in turn", []load{{}, {}, {}}, []int{0, 1, 2, 0, 1}},
		{"fewest requests", []load{{running: 2}, {running: 1}, {running: 4}}, []int{1, 1, 0, 0, 1}},
		{"waiting counts like running with an empty cache", []load{{running: 1, waiting: 2}, {running: 4}}, []int{0, 1}},
		// 4 + 3·6·(0.9-0.5) is 11.2.
		{"waiting counts for more with a full cache", []load{{running: 1, waiting: 3, kvBlocks: 90}, {running: 10}}, []int{1, 1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var engines []*Engine
			for _, l := range c.engines {
				e := newEngine(Config{KVTokens: 1600, MaxSeqs: max(1, l.running)})
				for i := range l.running {
					prompt := 1
					if i == 0 && l.kvBlocks > 0 {
						prompt = l.kvBlocks * 16
					}
					add(t, e, prompt, 100, nil, 0)
				}
				e.Step(0)
				for range l.waiting {
					add(t, e, 1, 1, nil, 0)
				}
				engines = append(engines, e)
			}
			b := NewBalancer(engines)
			var got []int
			for range c.want {
				rank := b.Choose(time.Second)
				add(t, engines[rank], 1, 1, nil, 0)
				got = append(got, rank)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("chose %v, want %v", got, c.want)
			}
		})
	}
}

// TestBalancerReportsAge ends requests of one engine, which the front end learns with the next
// report only.
func TestBalancerReportsAge(t *testing.T) {
	engines := []*Engine{newEngine(Config{}), newEngine(Config{})}
	for range 5 {
		add(t, engines[0], 10, 1, nil, 0)
	}
	for range 3 {
		add(t, engines[1], 10, 100, nil, 0)
	}
	b := NewBalancer(engines)
	if got := b.Choose(0); got != 1 {
		t.Errorf("chose engine %d, want 1, with fewer requests", got)
	}
	engines[0].Step(0) // all five have ended
	for _, c := range []struct {
		at   time.Duration
		want int
	}{{99 * time.Millisecond, 1}, {100 * time.Millisecond, 0}} {
		if got := b.Choose(c.at); got != c.want {
			t.Errorf("after %v: chose engine %d, want %d", c.at, got, c.want)
		}
	}
}
