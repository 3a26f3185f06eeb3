package server

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/config"
)

// TestTwoProxiesAgreeOnSession sends one turn of each session through each of two proxies, whose
// configurations list the replicas in different orders. The turns share no text, so neither proxy
// knows from its index where the other one has sent the session.
func TestTwoProxiesAgreeOnSession(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 4, 200_000)
	var proxies []*proxied
	for _, reverse := range []bool{false, true} {
		proxies = append(proxies, fleet.startProxy(t, func(c *config.Config) {
			c.Poll.Interval, c.Poll.FastInterval = time.Hour, time.Hour // a poll could see the other proxy's request
			if reverse {
				slices.Reverse(c.Backends)
			}
		}))
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	backendFor := func(url, text string, header, value string) string {
		t.Helper()
		body := fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":%q}]}`, strings.Repeat(text+" ", 100))
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set(header, value)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if response, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s (%v)", resp.Status, response, err)
		}
		return resp.Header.Get("X-Warmroute-Backend")
	}
	requests := map[string]int{}
	for i := range 24 {
		header, value := "X-Claude-Code-Session-Id", fmt.Sprint("session ", i)
		if i%2 == 0 {
			header = "session_id"
		}
		one := backendFor(proxies[0].url, fmt.Sprint(i, " begins"), header, value)
		two := backendFor(proxies[1].url, fmt.Sprint(i, " goes on after a compaction"), header, value)
		if one != two {
			t.Errorf("session %d: one proxy chose %s, the other %s", i, one, two)
		}
		requests[one]++
	}
	// The replicas' ports, of which the ranks are hashes, are random.
	if len(requests) < 2 {
		t.Errorf("all sessions are on one of %d replicas: %v", len(fleet.urls), requests)
	}
}
