package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	rollingClients   = 16
	rollingResponses = 50               // through the balancer, between two restarts
	rollingTimeout   = 90 * time.Second // for the drain and shutdown of a proxy
)

// restartProxiesInTurn restarts two proxies behind a load balancer in turn, twice, under
// its own load. The balancer has no health checks.
func restartProxiesInTurn(ctx context.Context, r *rig) error {
	return r.runTwoProxies(ctx, "timeouts: {serve_after_term: 1s}", func(two *twoProxies) error {
		for range 2 {
			if err := two.restartInTurn(ctx); err != nil {
				return err
			}
		}
		return two.awaitResponses(ctx)
	})
}

// twoProxies are proxies behind a load balancer, under load.
type twoProxies struct {
	proxies   []*testbed.Proxy
	completed atomic.Int64
}

// runTwoProxies calls act while two proxies with these settings serve the rig's replicas, behind
// a load balancer that gets its own load.
func (r *rig) runTwoProxies(ctx context.Context, settings string, act func(*twoProxies) error) (err error) {
	two := &twoProxies{}
	for i := range 2 {
		p, err := r.newProxy(fmt.Sprint("rolling-", i), settings)
		if err != nil {
			return err
		}
		if err := p.WriteConfig(r.replicas); err != nil {
			return err
		}
		if err := p.StartAndAwait(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Terminate(rollingTimeout)) }()
		two.proxies = append(two.proxies, p)
	}
	balancer, stopBalancer, err := startBalancer(ctx, r.dir, two.proxies)
	if err != nil {
		return err
	}
	defer stopBalancer()

	load := &clients{url: balancer, model: r.load.model, number: rollingClients, prompts: r.load.prompts}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		load.sendUntil(ctx, stop, func(q *prompt, streams bool, response loadgen.Response) {
			r.verdict.checkAndCount(q, streams, response)
			if response.Err == "" {
				two.completed.Add(1)
			}
		})
	}()
	defer func() { close(stop); <-stopped }()
	if err := two.awaitResponses(ctx); err != nil {
		return err
	}
	return act(two)
}

// awaitResponses waits until rollingResponses more requests were completed through the balancer.
func (two *twoProxies) awaitResponses(ctx context.Context) error {
	want := two.completed.Load() + rollingResponses
	return waitUntil(ctx, waitTimeout, "responses through the balancer", func() (bool, error) { return two.completed.Load() >= want, nil })
}

// restartInTurn ends each proxy (SIGTERM), waits for responses of the other and starts it again.
func (two *twoProxies) restartInTurn(ctx context.Context) error {
	for _, p := range two.proxies {
		if err := p.Terminate(rollingTimeout); err != nil {
			return err
		}
		if err := two.awaitResponses(ctx); err != nil {
			return err
		}
		if err := p.StartAndAwait(ctx); err != nil {
			return err
		}
		err := waitUntil(ctx, waitTimeout, "traffic for a proxy that was restarted", func() (bool, error) {
			m, err := p.ReadMetrics(ctx)
			return m.Sum("warmroute_requests_total") > 0, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// startBalancer starts nginx in front of the proxies.
func startBalancer(ctx context.Context, dir string, proxies []*testbed.Proxy) (url string, stop func(), err error) {
	program, err := exec.LookPath("nginx")
	if err != nil {
		return "", nil, fmt.Errorf("%w: install nginx, or leave out the scenario rolling", err)
	}
	ports, err := testbed.FreePorts(1)
	if err != nil {
		return "", nil, err
	}
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, []byte(nginxConfig(dir, ports[0], proxies)), 0o600); err != nil {
		return "", nil, err
	}
	process, err := testbed.StartProcess(exec.Command(program, "-e", filepath.Join(dir, "nginx.log"), "-c", config))
	if err != nil {
		return "", nil, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", ports[0])
	err = process.Await(ctx, waitTimeout, func(context.Context) bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return "http://" + address, func() { process.KillAndWait() }, err
}

// nginxConfig returns a configuration that keeps connections to the proxies and does not
// buffer streams. max_fails=0 keeps a server that refused a connection in use: the other
// may be the next to restart.
func nginxConfig(dir string, port int, proxies []*testbed.Proxy) string {
	var settings, servers strings.Builder
	if os.Geteuid() == 0 {
		settings.WriteString("user root;\n") // dir is readable only for this user
	}
	var temp strings.Builder
	for _, kind := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&temp, "  %s_temp_path %s;\n", kind, filepath.Join(dir, "nginx-"+kind))
	}
	for _, p := range proxies {
		fmt.Fprintf(&servers, "    server %s max_fails=0;\n", strings.TrimPrefix(p.URL, "http://"))
	}
	return fmt.Sprintf(`%sdaemon off;
worker_processes 1;
pid %s;
events { worker_connections 1024; }
http {
%s  access_log off;
  client_max_body_size 0;
  upstream proxies {
%s    keepalive 64;
  }
  server {
    listen 127.0.0.1:%d;
    location / {
      proxy_pass http://proxies;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
    }
  }
}
`, settings.String(), filepath.Join(dir, "nginx.pid"), temp.String(), servers.String(), port)
}
