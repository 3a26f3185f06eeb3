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

	"warmroute/loadgen"
	"warmroute/scripts/testbed"
)

const (
	rollingClients = 16
	rollingAnswers = 50               // through the balancer, between two restarts
	rollingTimeout = 90 * time.Second // for the drain and shutdown of a proxy
)

// restartProxiesInTurn restarts two proxies behind a load balancer in turn, twice, under
// its own load. The balancer has no health checks.
func restartProxiesInTurn(ctx context.Context, r *rig) (err error) {
	var proxies []*testbed.Proxy
	for i := range 2 {
		p, err := r.newProxy(fmt.Sprint("rolling-", i), "timeouts: {drain: 1s}")
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
		proxies = append(proxies, p)
	}
	balancer, stopBalancer, err := startBalancer(ctx, r.dir, proxies)
	if err != nil {
		return err
	}
	defer stopBalancer()

	var answered atomic.Int64
	load := &clients{url: balancer, model: r.load.model, number: rollingClients, prompts: r.load.prompts}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		load.sendUntil(ctx, stop, func(q *prompt, streams bool, response loadgen.Response) {
			r.verdict.checkAndCount(q, streams, response)
			if response.Err == "" {
				answered.Add(1)
			}
		})
	}()
	defer func() { close(stop); <-stopped }()
	more := func() error {
		want := answered.Load() + rollingAnswers
		return waitUntil(ctx, waitTimeout, "answers through the balancer", func() (bool, error) { return answered.Load() >= want, nil })
	}
	if err := more(); err != nil {
		return err
	}
	for range 2 {
		for _, p := range proxies {
			if err := p.Terminate(rollingTimeout); err != nil {
				return err
			}
			if err := more(); err != nil {
				return err
			}
			if err := p.StartAndAwait(ctx); err != nil {
				return err
			}
			err := waitUntil(ctx, waitTimeout, "traffic for a proxy that was restarted", func() (bool, error) {
				m, err := p.Scrape(ctx)
				return m.Sum("warmroute_requests_total") > 0, err
			})
			if err != nil {
				return err
			}
		}
	}
	return more()
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
