package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// TestMissingEndpoints sends each endpoint's requests to a fleet of which two replicas lack
// one each. No client may notice, and a replica that was restarted with its endpoint gets
// requests for it again.
func TestMissingEndpoints(t *testing.T) {
	t.Parallel()
	noResponses, noMessages, all := startSimProcess(t, "--speed", "20", "--without", "/v1/responses"),
		startSimProcess(t, "--speed", "20", "--without", "/v1/messages"), startSimProcess(t, "--speed", "20")
	addresses := []string{noResponses.address, noMessages.address, all.address}
	file := (&simFleet{}).configFile(t, fmt.Sprintf("backends: [http://%s, http://%s, http://%s]", noResponses.address, noMessages.address,
		all.address))
	p := startProgram(t, "--config", file.path)
	p.eventually("all are ready", func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == 3 })
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	// ask returns the backend that answered a request with a prompt of its own.
	ask := func(path string, i int) (backend string) {
		key := "messages"
		if path == "/v1/responses" {
			key = "input"
		}
		body := fmt.Sprintf(`{"model":"sim","max_tokens":2,%q:[{"role":"user","content":"%d %s"}]}`, key, i,
			strings.Repeat("Which replica has this endpoint? ", 20))
		resp, err := client.Post(p.url+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			return ""
		}
		defer resp.Body.Close()
		if got, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: status %d, %v: %s", path, resp.StatusCode, err, got)
		}
		return resp.Header.Get("X-Warmroute-Backend")
	}
	lacking := map[string]string{"/v1/responses": addresses[0], "/v1/messages": addresses[1], "/v1/chat/completions": ""}
	for path, without := range lacking {
		var asking sync.WaitGroup
		for i := range 40 {
			asking.Go(func() {
				if b := ask(path, i); b == without {
					t.Errorf("%s was answered by %s", path, b)
				}
			})
		}
		asking.Wait()
	}
	missing := func(name string) string {
		resp, err := client.Get(p.admin + "/api/state")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		state, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return gjson.GetBytes(state, `backends.#(name=="`+name+`").missing_endpoints`).Raw
	}
	for i, want := range []string{`["/v1/responses"]`, `["/v1/messages"]`, ""} {
		if got := missing(addresses[i]); got != want {
			t.Errorf("replica %d is shown to lack %s, want %s", i, got, want)
		}
	}

	noResponses.stop()
	noResponses.args = []string{"--speed", "20"}
	noResponses.start()
	n := 1000
	p.eventually("the restarted replica answers", func() bool {
		n++
		return ask("/v1/responses", n) == addresses[0]
	})
	if got := missing(addresses[0]); got != "" {
		t.Errorf("the restarted replica is shown to lack %s", got)
	}
}
