package server

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// TestPriorityInEngineQueue sends a low-priority request and then a normal one to a replica that runs one
// request at a time and is busy. Each claims another priority in its body.
func TestPriorityInEngineQueue(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		enginePriority bool
		want           []string // in the order of their responses
	}{
		{true, []string{"normal", "low"}},
		{false, []string{"low", "normal"}}, // by the body
	} {
		g := startGuarded(t, 1, sim.Config{Engine: engine.Config{MaxSeqs: 1, PriorityScheduling: true}}, func(s *config.Config) {
			s.Routing.Queue.Requests = 0 // all waiting requests are in the replica's queue
			s.Backends[0].EnginePriority = c.enginePriority
		})
		leave := g.openExternalStreams(0, 1, "sim", "of another client", 20_000)
		served := make(chan string, 2)
		send := func(name, bodyPriority, priority string) {
			body := `{"model":"sim","ignore_eos":true,"max_tokens":100,"priority":` + bodyPriority + `,"messages":[{"role":"user","content":"` +
				name + `"}]}`
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Warmroute-Priority", priority)
			go func() {
				resp, err := g.client.Do(req)
				if err != nil {
					served <- err.Error()
					return
				}
				defer resp.Body.Close()
				if response, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
					name = resp.Status + " " + string(response)
				}
				served <- name
			}()
		}
		send("low", "-1000", "10")
		g.until("the first request waits in the replica", func() bool { return g.load(0).Waiting == 1 })
		send("normal", "1000", "0")
		g.until("the second one does as well", func() bool { return g.load(0).Waiting == 2 })
		leave()
		if got := []string{<-served, <-served}; !slices.Equal(got, c.want) {
			t.Errorf("engine_priority %v: served in the order %q, want %q", c.enginePriority, got, c.want)
		}
	}
}
