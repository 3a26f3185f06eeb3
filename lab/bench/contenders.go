package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"warmroute/lab/testbed"
)

const (
	warmroute = "warmroute"
	baseline  = "baseline"  // another build of warmroute
	splitting = "splitting" // warmroute with half of the replicas for prefill, the others for decode
	direct    = "direct"    // no proxy: the delay of clients and mock replicas
	nginx     = "nginx"
	sglang    = "sglang-router"
)

// peers are the routers that --peers adds, with their default settings.
var peers = []string{sglang, "smg", "vllm-router"}

// bench has the paths and settings that the measurements share.
type bench struct {
	dir      string // temporary: logs, binaries, nginx's files
	repo     string
	compare  string        // where the peers are installed
	self     string        // this program, for its roles
	baseline string        // another build of warmroute; "": none
	warm     time.Duration // duration of the load before a measurement
	window   time.Duration // of one measurement
	results  *results
	progress io.Writer
}

// contender is a running proxy in front of the replicas.
type contender struct {
	*process        // nil: direct
	addrs    string // host:port, several with commas
	admin    string // URL of warmroute's admin listener
}

func (f *contender) stop() {
	if f.process != nil {
		f.process.stop()
	}
}

// startContender starts a proxy in front of the replicas and returns when it relays.
func (b *bench) startContender(ctx context.Context, name string, replicas []string) (*contender, error) {
	if name == direct {
		return &contender{addrs: strings.ReplaceAll(strings.Join(replicas, ","), "http://", "")}, nil
	}
	ports, err := testbed.FreePorts(2)
	if err != nil {
		return nil, err
	}
	listen, spare := strconv.Itoa(ports[0]), strconv.Itoa(ports[1])
	f := &contender{addrs: "127.0.0.1:" + listen, admin: "http://127.0.0.1:" + spare}
	var cmd *exec.Cmd
	switch name {
	case warmroute, baseline:
		binary := filepath.Join(b.dir, warmroute)
		if name == baseline {
			binary = b.baseline
		}
		cmd = exec.Command(binary, append([]string{"serve", "--listen", f.addrs, "--admin", "127.0.0.1:" + spare}, replicas...)...)
	case splitting:
		path := filepath.Join(b.dir, "splitting.yaml")
		if err := os.WriteFile(path, []byte(splittingConfig(replicas)), 0o644); err != nil {
			return nil, err
		}
		cmd = exec.Command(filepath.Join(b.dir, warmroute), "serve", "--listen", f.addrs, "--admin", "127.0.0.1:"+spare, "--config", path)
	case nginx:
		path := filepath.Join(b.dir, "nginx.conf")
		if err := os.WriteFile(path, []byte(nginxConfig(b.dir, f.addrs, replicas)), 0o644); err != nil {
			return nil, err
		}
		cmd = exec.Command("nginx", "-e", filepath.Join(b.dir, "nginx-error.log"), "-c", path)
	default:
		const script = `source "$1/lab/compare/routers"; run_router "${@:2}"`
		args := append([]string{"-c", script, "bash", b.repo, b.compare, name, listen, spare}, replicas...)
		cmd = exec.Command("bash", args...)
	}
	if f.process, err = startProcess(b.dir, name, cmd); err != nil {
		return nil, err
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	err = f.await(ctx, time.Minute, func() bool { return canRelay(&client, "http://"+f.addrs) })
	if err != nil {
		f.stop()
	}
	return f, err
}

// canRelay reports whether a replica responds to a chat: some routers respond to /health before
// they know a replica.
func canRelay(client *http.Client, url string) bool {
	_, body, _ := bytes.Cut(newChatRequest(0, 300, hot, 0, 0).bytes, []byte("\r\n\r\n"))
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	got, _ := io.ReadAll(resp.Body)
	return resp.StatusCode == http.StatusOK && bytes.Contains(got, []byte(marker))
}

// splittingConfig returns a configuration by which every request is split.
func splittingConfig(replicas []string) string {
	var config strings.Builder
	config.WriteString("disaggregation: {min_uncached_tokens: 1}\nbackends:\n")
	for i, r := range replicas {
		role := []string{"prefill", "decode"}[i%2]
		fmt.Fprintf(&config, "- {url: %q, role: %s}\n", r, role)
	}
	return config.String()
}

// nginxConfig returns a usual configuration for this job: round robin, no buffering of
// responses, connections to the replicas kept, no access log.
func nginxConfig(dir, listen string, replicas []string) string {
	var servers strings.Builder
	for _, r := range replicas {
		fmt.Fprintf(&servers, "    server %s;\n", strings.TrimPrefix(r, "http://"))
	}
	var temp strings.Builder
	for _, t := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&temp, "  %s_temp_path %s;\n", t, filepath.Join(dir, t))
	}
	return fmt.Sprintf(`daemon off;
pid %s;
worker_processes auto;
worker_rlimit_nofile 20000;
events { worker_connections 19000; }
http {
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
%s  upstream replicas {
%s    keepalive 256;
    keepalive_requests 1000000000;
  }
  server {
    listen %s backlog=4096;
    location / {
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }
  }
}
`, filepath.Join(dir, "nginx.pid"), temp.String(), servers.String(), listen)
}

// installContenders builds warmroute from the checkout and installs nginx from Debian, if
// it is missing, and the peers from PyPI.
func (b *bench) installContenders(ctx context.Context, withPeers bool) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(b.dir, warmroute), ".")
	build.Dir = b.repo
	commands := []*exec.Cmd{build}
	if _, err := exec.LookPath(nginx); err != nil {
		commands = append(commands, exec.CommandContext(ctx, "apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx"))
	}
	if withPeers {
		commands = append(commands, exec.CommandContext(ctx, "bash", "-c", `source "$1/lab/compare/routers"; install_routers "$2"`, "bash",
			b.repo, b.compare))
	}
	for _, c := range commands {
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(c.Args, " "), err, out)
		}
	}
	return nil
}

// startMockReplicas starts a process of mock replicas and returns their URLs when all
// listen.
func (b *bench) startMockReplicas(ctx context.Context, count int) (p *process, urls []string, err error) {
	cmd := exec.Command(b.self, "mock", "-replicas", fmt.Sprint(count), "-metrics",
		filepath.Join(b.repo, "backends/vllm/testdata/metrics-0.32.txt"))
	if p, err = startProcess(b.dir, "mock", cmd); err != nil {
		return nil, nil, err
	}
	err = p.await(ctx, 10*time.Second, func() bool {
		text, _ := os.ReadFile(p.log)
		urls = strings.Fields(string(text))
		return len(urls) == count
	})
	if err != nil {
		p.stop()
	}
	return p, urls, err
}
