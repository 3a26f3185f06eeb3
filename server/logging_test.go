package server

import (
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// A backend that becomes slow is logged once, and so is the end of it.
func TestSlowBackendLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &backends.Backend{Name: "one"}
		b.SetState(backends.Ready)
		r, err := router.New(router.Options{
			Settings: router.Settings{Policy: "prefix", PollInterval: time.Second},
			Backends: []*backends.Backend{b}, BlockBytes: 256, IndexMaxBytes: 1 << 20, Now: time.Now, Rand: rand.NewPCG(1, 1),
		})
		if err != nil {
			t.Fatal(err)
		}
		var out syncBuffer
		log := newProgressLog(r, slog.New(slog.NewTextHandler(&out, nil)))
		load := backends.Load{QueuesKnown: true, Running: 4, OwnInFlight: 4, TokensKnown: true}
		generate := func(seconds int, step float64) (slow, ended int) {
			for range seconds {
				time.Sleep(time.Second)
				load.Gaps += 4 / step
				load.GapSeconds += 4
				load.GenerationTokens, load.PolledAt = load.Gaps, time.Now()
				l := load
				b.SetLoad(&l)
				r.ObserveLoad(b, &l)
				log.logChange(b)
			}
			return strings.Count(out.String(), `msg="backend slow" backend=one times_usual=1`),
				strings.Count(out.String(), `msg="backend not slow any more" backend=one`)
		}
		if slow, ended := generate(120, 0.02); slow+ended > 0 {
			t.Errorf("before it is slow: %s", out.String())
		}
		if slow, ended := generate(20, 0.3); slow != 1 || ended != 0 {
			t.Errorf("when it is slow: %s", out.String())
		}
		if slow, ended := generate(20, 0.02); slow != 1 || ended != 1 {
			t.Errorf("when it is not slow any more: %s", out.String())
		}
	})
}
