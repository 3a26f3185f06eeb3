package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestFileDescriptorWarningAtStart(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "limits: {in_flight: 1000, connections: 1000}")
	start := func(limit string) *program {
		return startCommand(t, exec.Command("sh", "-c", `ulimit -n `+limit+`; exec "$0" serve --config "$1"`, binary, file.path))
	}
	start("500").awaitLog(`level=WARN msg="may need 2102 file descriptors, limit is 500: `)
	if log := start("2102").log.String(); strings.Contains(log, "descriptors") {
		t.Errorf("with enough of them:\n%s", log)
	}
}

// Without file descriptors no backend is blamed, the log says so once, and the proxy
// recovers when there are descriptors again.
func TestOutOfDescriptors(t *testing.T) {
	fleet := startSimFleet(t, 2, 200_000)
	file := fleet.configFile(t, `
limits: {in_flight: 20, connections: 1000}
routing: {queue: {time: 1s}}
health: {interval: 50ms, down_interval: 50ms}
poll: {interval: 250ms, fast_interval: 250ms, timeout: 250ms}
timeouts: {keepalive_idle: 50ms, read_header: 10m}
`)
	begun := time.Now()
	p := startCommand(t, exec.Command("sh", "-c", `ulimit -n 90; exec "$0" serve --config "$1"`, binary, file.path))
	// Clients whose connections are open already.
	clients := make([]*http.Client, 20)
	for i := range clients {
		clients[i] = &http.Client{Transport: &http.Transport{}}
		defer clients[i].CloseIdleConnections()
		resp, err := clients[i].Get(p.url + "/livez")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	// Idle connections. Those that are not accepted wait for a descriptor,
	// and take each that is free.
	var unused []net.Conn
	defer func() {
		for _, c := range unused {
			c.Close()
		}
	}()
	for range 200 {
		c, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		unused = append(unused, c)
	}
	p.awaitLog(`level=ERROR msg="out of file descriptors" limit=90 `)
	var served, refused atomic.Int64
	ask := func(client *http.Client, tokens int) {
		body := fmt.Sprintf(`{"model":"sim","max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":"hello"}]}`, tokens)
		resp, err := client.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		answer, err := io.ReadAll(resp.Body)
		switch {
		case err == nil && resp.StatusCode == http.StatusOK:
			served.Add(1)
		case err == nil && resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") != "" &&
			strings.Contains(string(answer), `"code":"out_of_descriptors"`):
			refused.Add(1)
		default:
			t.Errorf("status %d, header %v, %s, error %v", resp.StatusCode, resp.Header, answer, err)
		}
	}
	var all sync.WaitGroup
	for _, c := range clients {
		all.Go(func() { ask(c, 4000) }) // two seconds, in which it keeps its connection to a replica
	}
	all.Wait()
	if refused.Load() == 0 {
		t.Errorf("no request lacked a descriptor, %d were answered", served.Load())
	}
	for _, c := range unused {
		c.Close()
	}
	before := served.Load()
	p.eventually("requests are answered again", func() bool {
		ask(clients[0], 4)
		return served.Load() > before
	})
	log := p.log.String()
	if n, most := strings.Count(log, "out of file descriptors"), 1+int(time.Since(begun)/time.Minute); n > most {
		t.Errorf("said %d times, want %d at most", n, most)
	}
	for _, wrong := range []string{"state=down", "attempt failed", "metrics scrape failed", "reload", "accept failed"} {
		if strings.Contains(log, wrong) {
			t.Errorf("the log has %q", wrong)
		}
	}
	if n := metricSum(t, p.admin, "warmroute_backend_breaker_opens_total"); n != 0 {
		t.Errorf("breakers opened %v times", n)
	}
	if n := metricSum(t, p.admin, "warmroute_backend_ready"); n != 2 {
		t.Errorf("%v backends are ready, want 2", n)
	}
}
