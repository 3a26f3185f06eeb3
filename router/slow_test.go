package router

import (
	"strings"
	"testing"
	"time"

	"warmroute/backends"
)

// generating is a fleet whose backends generate four streams each, and are polled every second.
type generating struct {
	*Router
	t     *testing.T
	fleet []*backends.Backend
	clock *clock
	loads []backends.Load
}

func newGenerating(t *testing.T, n int) *generating {
	t.Helper()
	r, fleet, c := newFleet(t, n, "prefix")
	g := &generating{r, t, fleet, c, make([]backends.Load, n)}
	for i := range fleet {
		for key := range 4 {
			d := mustPick(t, r, ask(fleet[i:i+1], 10*i+key, 10))
			d.RecordFirstEvent()
			t.Cleanup(func() { d.Release(Outcome{End: Completed}) })
		}
	}
	return g
}

// run polls for so many seconds, with steps that take so many milliseconds, and returns after how many of them each backend was
// slow for the first time; 0: it was not.
func (g *generating) run(seconds int, milliseconds ...float64) (slowAfter []int) {
	slowAfter = make([]int, len(g.fleet))
	for second := range seconds {
		g.clock.advance(time.Second)
		for i, b := range g.fleet {
			l := &g.loads[i]
			l.QueuesKnown, l.Running, l.OwnInFlight, l.TokensKnown, l.PolledAt = true, 4, 4, true, g.clock.now
			l.Gaps += 4 * 1000 / milliseconds[i]
			l.GapSeconds += 4
			l.GenerationTokens = l.Gaps
			load := *l
			b.SetLoad(&load)
			g.ObserveLoad(b, &load)
			if g.Status(b).Slowdown > 0 && slowAfter[i] == 0 {
				slowAfter[i] = second + 1
			}
		}
	}
	return slowAfter
}

func (g *generating) check(what string, slow ...bool) {
	g.t.Helper()
	for i, b := range g.fleet {
		s := g.Status(b)
		if s.Slowdown > 0 != slow[i] || s.State != Ready || strings.Contains(s.Reason, "slow") != slow[i] {
			g.t.Errorf("%s: %s is %s, %q, with a slowdown of %.1f; want slow: %v", what, b.Name, s.State, s.Reason, s.Slowdown, slow[i])
		}
	}
}

// A replica that is 15 times slower than it was is found after ten seconds, and so is its recovery. The speeds of a mixed fleet
// say nothing.
func TestSlowBackend(t *testing.T) {
	g := newGenerating(t, 3)
	g.run(300, 8, 30, 100)
	g.check("a mixed fleet", false, false, false)
	after := g.run(20, 8, 450, 100)
	if after[1] < 10 || after[1] > 17 {
		t.Errorf("it was slow after %d s", after[1])
	}
	g.check("15 times slower", false, true, false)
	if s := g.Status(g.fleet[1]).Slowdown; s < 12 || s > 17 {
		t.Errorf("a slowdown of %.1f", s)
	}
	g.run(11, 8, 30, 100)
	g.check("it recovered", false, false, false)
	g.run(20, 8, 60, 100)
	g.check("twice as slow", false, false, false)
	g.run(8, 8, 450, 100)
	g.check("for eight seconds", false, false, false)
}

func TestNotSlow(t *testing.T) {
	t.Run("all at once", func(t *testing.T) {
		g := newGenerating(t, 4)
		g.run(300, 20, 20, 20, 20)
		g.run(20, 300, 300, 300, 300)
		g.check("all", false, false, false, false)
	})
	t.Run("at the start", func(t *testing.T) {
		g := newGenerating(t, 2)
		g.run(5, 20, 20)
		g.run(15, 20, 300)
		g.check("the usual speed is not known", false, false)
	})
	t.Run("other clients", func(t *testing.T) {
		g := newGenerating(t, 2)
		g.run(300, 20, 20)
		for range 20 {
			for i := range g.loads {
				g.loads[i].Waiting = 10 // on both, of other clients
			}
			g.run(1, 20, 300)
		}
		g.check("other clients' requests wait", false, false)
	})
}

func TestSlowBackends(t *testing.T) {
	g := newGenerating(t, 4)
	g.run(300, 20, 20, 20, 20)
	g.run(20, 300, 20, 20, 200)
	g.check("two of four", true, false, false, true)
	alone := newGenerating(t, 1)
	alone.run(300, 20)
	alone.run(20, 300)
	alone.check("the only one", true)
	// After ten minutes that is usual.
	alone.run(11*60, 300)
	alone.check("for more than ten minutes", false)
}

func TestSlownessIsForgotten(t *testing.T) {
	g := newGenerating(t, 2)
	g.run(300, 20, 20)
	g.run(20, 300, 20)
	g.check("15 times slower", true, false)
	g.ForgetCache(g.fleet[0])
	g.check("another process", false, false)
}
