package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFileDescriptorWarningAtStart(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "limits: {in_flight: 1000, connections: 1000}")
	file.startWithDescriptors(500).awaitLog(`level=WARN msg="file descriptor limit is too low: 2102 may be needed, limit is 500, `)
	if log := file.startWithDescriptors(2102).log.String(); strings.Contains(log, "descriptors") {
		t.Errorf("with enough of them:\n%s", log)
	}
}

// Replicas that register, or are found under a name, need descriptors as well.
func TestFileDescriptorWarningForRegisteredReplicas(t *testing.T) {
	t.Parallel()
	fleet, registered := startSimFleet(t, 1, 0), startSimFleet(t, 1, 0)
	file := fleet.configFile(t, registrationYAML+"limits: {in_flight: 1000, connections: 1000}")
	p := file.startWithDescriptors(2102)
	p.register(registered.urls[0])
	p.awaitLog(`level=WARN msg="file descriptor limit is too low: 2104 may be needed, limit is 2102, `)
}

// neverTimeOut has the proxy keep connections that carry nothing.
const neverTimeOut = "timeouts: {read_header: 10m}"

// getOverNewConnection returns the status of a response that comes within a minute.
func getOverNewConnection(t *testing.T, url string) int {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	resp, err := client.Get(url)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Error(err)
	}
	return resp.StatusCode
}

// openIdleConnections opens connections to the proxy that carry nothing, until the test ends.
func (p *program) openIdleConnections(n int) {
	p.t.Helper()
	for range n {
		c, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Cleanup(func() { c.Close() })
	}
}

func TestIdleConnectionsBeyondDescriptorLimit(t *testing.T) {
	t.Parallel()
	p := startSimFleet(t, 2, 200_000).configFile(t, neverTimeOut).startWithDescriptors(90)
	p.openIdleConnections(300)
	var clients sync.WaitGroup
	for range 10 {
		clients.Go(func() {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
			if err := askStream(client, p.url, "hello", 4, nil); err != nil {
				t.Error(err)
			}
		})
	}
	clients.Wait()
	if status := getOverNewConnection(t, p.admin+"/metrics"); status != http.StatusOK {
		t.Errorf("admin listener: status %d", status)
	}
}

// A limit that is lowered while the proxy runs counts from the next reload on. Until then idle
// connections are closed when descriptors run out.
func TestIdleConnectionsBeyondLoweredDescriptorLimit(t *testing.T) {
	t.Parallel()
	p := startSimFleet(t, 2, 200_000).configFile(t, neverTimeOut).startWithDescriptors(400)
	p.openIdleConnections(100)
	p.eventually("they are accepted", func() bool { return metricSum(t, p.admin, "process_open_fds") > 100 })
	p.limitDescriptors(80)
	p.openIdleConnections(100)
	p.awaitLog(`msg="out of file descriptors" limit=80 `)
	for range 5 {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
		if err := askStream(client, p.url, "hello", 4, nil); err != nil {
			t.Error(err)
		}
		if status := getOverNewConnection(t, p.admin+"/metrics"); status != http.StatusOK {
			t.Errorf("admin listener: status %d", status)
		}
	}
}

func TestAdminListenerWithoutDescriptors(t *testing.T) {
	t.Parallel()
	p := startSimFleet(t, 2, 2_000_000).configFile(t, "").startWithDescriptors(70)
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	for range 100 {
		clients.Go(func() { // a stream, or a connection that is never accepted
			body := `{"model":"sim","stream":true,"max_tokens":100000,"ignore_eos":true,"messages":[{"role":"user","content":"hello"}]}`
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			if resp, err := http.DefaultTransport.RoundTrip(req); err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	p.awaitLog(`msg="out of file descriptors" limit=70 `)
	for range 5 {
		if status := getOverNewConnection(t, p.admin+"/metrics"); status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	}
}

// limitDescriptors changes the limit of the process while it runs.
func (p *program) limitDescriptors(limit int) {
	p.t.Helper()
	var before unix.Rlimit
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
		p.t.Fatal(err)
	}
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(limit), Max: before.Max}, nil); err != nil {
		p.t.Fatal(err)
	}
}

// Without file descriptors no backend is blamed, the log says so once, and the proxy
// recovers when there are descriptors again.
func TestOutOfDescriptors(t *testing.T) {
	fleet := startSimFleet(t, 2, 200_000)
	file := fleet.configFile(t, `
limits: {in_flight: 20, connections: 1000}
routing: {queue: {none_ready_timeout: 1s}}
health: {interval: 50ms, down_interval: 50ms}
poll: {interval: 250ms, fast_interval: 250ms, timeout: 250ms}
timeouts: {keepalive_idle: 50ms, read_header: 10m}
`)
	begun := time.Now()
	p := file.startWithDescriptors(400)
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
	// A few descriptors are left for connections to replicas.
	limit := int(metricSum(t, p.admin, "process_open_fds")) + 5
	p.limitDescriptors(limit)
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
	p.awaitLog(fmt.Sprintf(`level=ERROR msg="out of file descriptors" limit=%d `, limit))
	p.limitDescriptors(400)
	before := served.Load()
	p.eventually("requests are answered again", func() bool {
		ask(clients[0], 4)
		return served.Load() > before
	})
	log := p.log.String()
	if n, most := strings.Count(log, "out of file descriptors"), 1+int(time.Since(begun)/time.Minute); n > most {
		t.Errorf("said %d times, want %d at most", n, most)
	}
	for _, wrong := range []string{"state=down", "attempt failed", "poll failed", "reload", "accept failed"} {
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
