package server

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/sim"
)

// What a replica has accepted and does nothing about is answered by another, be
// it that only its engine hangs or all of its process.
func TestHungBackend(t *testing.T) {
	for name, everything := range map[string]bool{"its answers": false, "its process": true} {
		t.Run(name, func(t *testing.T) {
			g := startGuarded(t, 2, sim.Config{}, nil)
			holder := g.goesTo("sim", known+"one")
			g.fault(holder, sim.Fault{Kind: sim.Hang, Everything: everything})
			var all []<-chan int
			for i := range 4 {
				all = append(all, g.ask(fmt.Sprint(known, i)))
			}
			g.until("one was sent there", func() bool { return g.server.fleet.registry.All()[holder].InFlight.Load() > 0 })
			for i, done := range all {
				if by := <-done; by != 1-holder {
					t.Errorf("request %d was answered by replica %d, which hangs", i, by)
				}
			}
			if metricSum(t, g.admin, "warmroute_retries_total") == 0 {
				t.Error("none was sent again")
			}
			g.fault(holder, sim.Fault{Kind: sim.Clear})
		})
	}
}

// A request that does not stream may take any time as long as the polls see progress.
// Without it, and without metrics that show so, timeouts.response ends it.
func TestResponseTimeoutFollowsPolledProgress(t *testing.T) {
	const limit = 3 * time.Second
	g := startGuarded(t, 1, sim.Config{}, func(c *config.Config) { c.Timeouts.Response = limit })
	ask := func(tokens int) (status int, body string, took time.Duration) {
		began := time.Now()
		resp, err := g.client.Post(g.url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(
			`{"model":"sim","ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"hi"}]}`, tokens)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text), time.Since(began)
	}
	if status, body, took := ask(1000); status != http.StatusOK || took < 2*limit {
		t.Errorf("a long response: %d after %v: %.200s", status, took, body)
	}
	g.fault(0, sim.Fault{Kind: sim.MetricsGone})
	g.until("the metrics are known to be gone", func() bool { return g.server.fleet.registry.All()[0].Load() == nil })
	g.fault(0, sim.Fault{Kind: sim.Hang})
	if status, body, _ := ask(1); status != http.StatusGatewayTimeout || !strings.Contains(body, "response_timeout") {
		t.Errorf("a replica that hangs: %d: %.200s", status, body)
	}
	g.fault(0, sim.Fault{Kind: sim.Clear})
}
