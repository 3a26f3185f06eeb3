package main

import (
	"testing"
	"testing/synctest"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/testbed"
)

func TestRecoveredReplicaTraffic(t *testing.T) {
	f := func(real bool, first time.Duration, violations int) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			r := &rig{real: real, verdict: newVerdict(nil), recovered: map[string]time.Duration{}}
			replicas := []*testbed.Replica{{Name: "r0"}, {Name: "r1"}}
			go func() {
				for i, later := range []time.Duration{time.Second, first - time.Second} {
					time.Sleep(later)
					one := replicas[i]
					r.verdict.checkAndCount(&prompt{}, false, loadgen.Response{Result: replay.Result{Sent: time.Now()}, Backend: one.Name, Output: "x",
						Finish: "length", Usage: true})
				}
			}()
			if err := r.awaitTraffic(t.Context(), replicas[1], replicas[0]); err != nil {
				t.Fatal(err)
			}
			if r.recovered["r0"] != time.Second || r.recovered["r1"] != first || r.verdict.violationCount != violations {
				t.Errorf("first traffic after %v: recovered %v, violations %q", first, r.recovered, r.verdict.violations)
			}
		})
	}
	f(false, 2*time.Second, 0)
	f(false, recoveryTimeout, 0)
	f(false, recoveryTimeout+time.Second, 1)
	f(true, recoveryTimeout+time.Second, 1)
}
