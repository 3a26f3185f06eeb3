//go:build unix

package e2e

import (
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// beginHandOver begins one that comes to no end by itself, because the new process
// has a replica more, which never answers a check.
func (p *program) beginHandOver(file *configFile) (pid int) {
	p.t.Helper()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { silent.Close() })
	file.write("health: {timeout: 10m}\nbackends: [" + strings.Join(file.fleet.urls, ", ") + ", http://" + silent.Addr().String() + "]")
	p.signal(syscall.SIGUSR2)
	pid, _ = strconv.Atoi(p.awaitLog(`msg="handing over" pid=(\d+)`))
	p.t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	p.awaitLog(`(?s)msg="handing over".*msg=listening admin=`)
	return pid
}

// A hand-over is under way when the old process is told to end: the new one, of
// which nobody knows yet, must not stay.
func TestStopDuringHandOver(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	pid := p.beginHandOver(file)
	p.signal(os.Interrupt)
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	p.eventually("the new process ends", func() bool { return syscall.Kill(pid, 0) != nil })
}

// The sockets are the old process's until the new one serves: what the new one
// accepted at its end would be refused.
func TestHandOverChildStopped(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	pid := p.beginHandOver(file)
	clients := p.startCrowd(8, &http.Transport{})
	clients.more(20)
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.awaitLog(`msg="hand-over failed, this process keeps serving" err="the new process ended before it served: exit status 0"`)
	clients.more(100)
	clients.leave()
	if log := p.log.String(); strings.Contains(log, "draining") || strings.Contains(log, "shutting down") {
		t.Errorf("the log:\n%s", log)
	}
}

// unrepeatable sends each request once: what is lost of it is lost.
type unrepeatable struct{ *http.Transport }

func (u unrepeatable) RoundTrip(r *http.Request) (*http.Response, error) {
	once := r.Clone(r.Context())
	once.GetBody = nil
	return u.Transport.RoundTrip(once)
}

// A request may be on its way on a connection that the old process closes.
func TestHandOverWithoutDrain(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {drain: 0}").path)
	var clients sync.WaitGroup
	var answered atomic.Int64
	over := make(chan struct{})
	for range 8 {
		clients.Go(func() {
			client := &http.Client{Transport: unrepeatable{&http.Transport{}}}
			defer client.CloseIdleConnections()
			for {
				select {
				case <-over:
					return
				default:
				}
				if err := askStream(client, p.url, "hello", 1, nil); err != nil {
					t.Error(err)
				}
				answered.Add(1)
			}
		})
	}
	more := func(n int64) {
		from := answered.Load()
		p.eventually("more are answered", func() bool { return answered.Load() >= from+n })
	}
	more(100)
	p.handOver()
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	more(100)
	close(over)
	clients.Wait()
}

// Another setting takes effect with a hand-over as with any start.
func TestHandOverWithNewAddress(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	text, err := os.ReadFile(file.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file.path, []byte(strings.Replace(string(text), "listen: 127.0.0.1:0", "listen: localhost:0", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	p.handOver()
	public := p.awaitLog(`(?s)msg="handing over.*msg=listening public=(\S+)`)
	if old, admin := strings.TrimPrefix(p.url, "http://"), "http://"+p.awaitLog(`(?s)msg="handing over.*msg=listening admin=(\S+)`); public == old || admin != p.admin {
		t.Errorf("public was %s and is %s; admin was %s and is %s", old, public, p.admin, admin)
	}
	p.exit()
	if _, err := p.get("/livez"); err == nil {
		t.Error("the old address still answers")
	}
	if err := askStream(http.DefaultClient, "http://"+public, "hello", 4, nil); err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}
