package main

import (
	"fmt"
	"testing"

	"warmroute/backends/vllmsim"
)

// What a replica has accepted and does nothing about is answered by another, be
// it that only its engine hangs or all of its process.
func TestAReplicaThatHangsLosesNothing(t *testing.T) {
	for name, everything := range map[string]bool{"its answers": false, "its process": true} {
		t.Run(name, func(t *testing.T) {
			g := startGuarded(t, 2, vllmsim.Config{}, nil)
			holder := g.goesTo("sim", known+"one")
			g.fault(holder, vllmsim.Fault{Kind: vllmsim.Hang, Everything: everything})
			var all []<-chan int
			for i := range 4 {
				all = append(all, g.ask(fmt.Sprint(known, i)))
			}
			g.until("one was sent there", func() bool { return g.service.registry.All()[holder].InFlight.Load() > 0 })
			for i, done := range all {
				if by := <-done; by != 1-holder {
					t.Errorf("request %d was answered by replica %d, which hangs", i, by)
				}
			}
			if metricSum(t, g.admin, "warmroute_retries_total") == 0 {
				t.Error("none was sent again")
			}
			g.fault(holder, vllmsim.Fault{Kind: vllmsim.Clear})
		})
	}
}
