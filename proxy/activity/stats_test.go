package activity

import (
	"fmt"
	"math"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
)

func TestStatsWindowExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New()
		b := &backends.Backend{Name: "b"}
		end := func(ttft time.Duration, cached int) {
			a.stats.countEnded(b, time.Now(), &metrics.Request{Code: http.StatusOK, Model: "m", TTFT: ttft, PromptTokens: 100, CachedTokens: cached,
				ElsewhereTokens: (100 - cached) / 5})
		}
		time.Sleep(time.Minute)
		for _, ttft := range []time.Duration{10, 20, 30, 9000} {
			end(ttft*time.Millisecond, 75)
		}
		time.Sleep(StatsInterval)
		now := a.Stats()
		if now.Recent.HitRatio != 0.75 || math.Abs(now.TTFT50-0.020) > 0.003 || math.Abs(now.TTFT99-9) > 1 ||
			math.Abs(now.PerSecond-4./30) > 0.03 || now.Backends[b].HitRatio != 0.75 || now.Recent.ElsewhereRatio != 0.05 {
			t.Errorf("got %+v, %+v", now.Recent, now.Backends[b])
		}
		if got := now.Models["m"]; got != now.Recent {
			t.Errorf("the only model: %+v", got)
		}
		time.Sleep(time.Minute)
		later := a.Stats()
		if later.PerSecond != 0 || !math.IsNaN(later.HitRatio) || !math.IsNaN(later.TTFT99) || later.Backends[b].PerSecond != 0 ||
			len(later.Models) != 0 {
			t.Errorf("a minute later: %+v", later)
		}
		time.Sleep(2 * time.Hour) // its places are others' by now
		end(time.Millisecond, 50)
		if last := a.Stats(); last.HitRatio != 0.5 || last.Backends[b].HitRatio != 0.5 || last.Models["m"].HitRatio != 0.5 {
			t.Errorf("two hours later: %+v", last)
		}
	})
}

func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New()
		began := time.Now()
		end := func(model string, ttft time.Duration, cached int) {
			a.stats.countEnded(nil, time.Now(), &metrics.Request{Code: http.StatusOK, Model: model, TTFT: ttft, PromptTokens: 100,
				CachedTokens: cached})
		}
		time.Sleep(time.Minute + time.Second)
		for range 20 {
			end("m", 20*time.Millisecond, 75)
		}
		end("other", 0, 0)
		a.stats.recordQueue(time.Now(), 3, map[string]int{"m": 2})
		time.Sleep(StatsInterval)
		a.stats.recordQueue(time.Now(), 1, map[string]int{"waits": 1})
		time.Sleep(StatsInterval)

		const at = statsPoints - 2 // the step of the requests; the one after it had none
		fleet, _ := a.History("")
		if len(fleet.PerSecond) != statsPoints || !fleet.End.Equal(began.Add(80*time.Second)) {
			t.Fatalf("%d points until %v", len(fleet.PerSecond), fleet.End)
		}
		if fleet.PerSecond[at] != 2.1 || fleet.Queued[at] != 3 || fleet.PerSecond[at+1] != 0 || fleet.Queued[at+1] != 1 ||
			math.Abs(fleet.HitRatio[at]-1500./2100) > 1e-6 {
			t.Errorf("got %v, %v, %v", fleet.PerSecond[at:], fleet.Queued[at:], fleet.HitRatio[at:])
		}
		if math.Abs(fleet.TTFT50[at]-0.02) > 0.002 || fleet.TTFT99[at] <= fleet.TTFT50[at] || !math.IsNaN(fleet.TTFT50[at+1]) ||
			!math.IsNaN(fleet.HitRatio[at+1]) {
			t.Errorf("got %v, %v", fleet.TTFT50[at:], fleet.TTFT99[at:])
		}
		if first := at - 6; fleet.PerSecond[first] != 0 || !math.IsNaN(fleet.PerSecond[first-1]) || !math.IsNaN(fleet.Queued[first-1]) {
			t.Errorf("around the start: %v", fleet.PerSecond[first-1:])
		}
		m, known := a.History("m")
		if !known || m.PerSecond[at] != 2 || m.HitRatio[at] != 0.75 || m.Queued[at] != 2 || m.Queued[at+1] != 0 ||
			!math.IsNaN(m.PerSecond[at-1]) {
			t.Errorf("a model: %v, %v, %v", m.PerSecond[at-1:], m.HitRatio[at:], m.Queued[at:])
		}
		if waits, _ := a.History("waits"); waits.Queued[at+1] != 1 {
			t.Errorf("a model whose requests wait: %v", waits.Queued[at:])
		}
		if _, known := a.History("unknown"); known {
			t.Error("a model without requests is known")
		}

		time.Sleep(time.Hour)
		if fleet, _ = a.History(""); fleet.PerSecond[0] != 0 || !math.IsNaN(fleet.TTFT50[0]) {
			t.Errorf("an hour later: %v", fleet.PerSecond[0])
		}
	})
}

func TestStatsForgetTheModelThatIsIdleLongest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New()
		end := func(model string) {
			a.stats.countEnded(nil, time.Now(), &metrics.Request{Code: http.StatusOK, Model: model})
		}
		for i := range maxStatsModels {
			end(fmt.Sprint(i))
		}
		time.Sleep(StatsInterval)
		for i := range maxStatsModels {
			if i != 7 {
				end(fmt.Sprint(i))
			}
		}
		end("new")
		if _, known := a.History("7"); known || len(a.stats.models) != maxStatsModels {
			t.Errorf("%d models", len(a.stats.models))
		}
		if _, known := a.History("new"); !known {
			t.Error("the new one is missing")
		}
	})
}
