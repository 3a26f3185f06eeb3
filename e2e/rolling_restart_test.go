//go:build unix

package e2e

import (
	"bytes"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// balancer is a reverse proxy before several servers, in turn. It keeps connections and
// sends no request again that may have been sent: only where a server refuses the
// connection it asks another, as nginx does.
type balancer struct {
	transport http.RoundTripper
	hosts     []string
	ready     []atomic.Bool
	next      atomic.Int64
	refused   atomic.Int64
}

// startBalancer returns one that asks servers for their readiness, or one that does not.
func startBalancer(t *testing.T, checks bool, urls ...string) (b *balancer, base string) {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	b = &balancer{transport: unrepeatable{transport}, ready: make([]atomic.Bool, len(urls))}
	for i, u := range urls {
		parsed, err := url.Parse(u)
		if err != nil {
			t.Fatal(err)
		}
		b.hosts = append(b.hosts, parsed.Host)
		b.ready[i].Store(true)
	}
	server := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.Out.URL.Scheme = "http" },
		Transport:     b,
		FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			http.Error(w, err.Error(), http.StatusBadGateway)
		},
		ErrorLog: log.New(io.Discard, "", 0),
	})
	t.Cleanup(server.Close)
	t.Cleanup(transport.CloseIdleConnections)
	if checks {
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			b.check(stop)
		}()
		t.Cleanup(func() { close(stop); <-ended })
	}
	return b, server.URL
}

// check asks every server every 50 ms whether it is ready, until stop is closed.
func (b *balancer) check(stop <-chan struct{}) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	for {
		for i, host := range b.hosts {
			resp, err := client.Get("http://" + host + "/readyz")
			if err == nil {
				resp.Body.Close()
			}
			b.ready[i].Store(err == nil && resp.StatusCode == http.StatusOK)
		}
		select {
		case <-stop:
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// RoundTrip implements http.RoundTripper.
func (b *balancer) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	body, err := io.ReadAll(r.Body) // a transport that cannot connect closes it
	if err != nil {
		return nil, err
	}
	first := int(b.next.Add(1))
	for i := range 2 * len(b.hosts) {
		n := (first + i) % len(b.hosts)
		if i < len(b.hosts) && !b.ready[n].Load() {
			continue
		}
		out := r.Clone(r.Context())
		out.URL.Host, out.Body = b.hosts[n], io.NopCloser(bytes.NewReader(body))
		resp, err = b.transport.RoundTrip(out)
		if dial, ok := err.(*net.OpError); !ok || dial.Op != "dial" {
			return resp, err
		}
		b.refused.Add(1)
	}
	return nil, err
}

// TestRollingRestartOfProxies restarts two proxies one after the other behind a
// balancer, under load.
func TestRollingRestartOfProxies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		checks bool
	}{{"balancer with readiness checks", true}, {"balancer without", false}} {
		t.Run(c.name, func(t *testing.T) {
			fleet := startSimFleet(t, 2, 200_000)
			proxies := make([]*program, 2)
			var starts []func() *program
			for i := range proxies {
				file := fleet.configFile(t, "timeouts: {serve_after_term: 500ms}")
				proxies[i] = startProgram(t, "--config", file.path)
				address := proxies[i].url[len("http://"):]
				starts = append(starts, func() *program {
					return startCommand(t, exec.Command(binary, "serve", "--config", file.path, "--listen", address))
				})
			}
			b, base := startBalancer(t, c.checks, proxies[0].url, proxies[1].url)
			clients := (&program{t: t, url: base}).startCrowd(16, &http.Transport{})
			clients.more(100)
			for i := range proxies {
				proxies[i].signal(syscall.SIGTERM)
				if status := proxies[i].exit(); status != 0 {
					t.Errorf("proxy %d ended with status %d", i, status)
				}
				clients.more(100)
				proxies[i] = starts[i]()
				served := func() bool { return metricSum(t, proxies[i].admin, "warmroute_requests_total") > 0 }
				proxies[i].eventually("it has traffic again", served)
			}
			clients.more(100)
			clients.leave()
			t.Logf("%d requests answered; %d connections refused, all tried at the other proxy", clients.answered.Load(), b.refused.Load())
		})
	}
}
