//go:build unix

package e2e

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/freeport"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// upgrade starts a binary upgrade of the process, and returns the pid of the new process.
func (p *program) upgrade() (pid int) {
	p.t.Helper()
	p.signal(syscall.SIGUSR2)
	pid, _ = strconv.Atoi(p.awaitLog(`msg="binary upgrade done;.* pid=(\d+)`))
	p.t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	return pid
}

// succeed makes p the new process of a binary upgrade. Its end can be seen in
// the log alone: it is nobody's child.
func (p *program) succeed(pid int) {
	process, err := os.FindProcess(pid)
	if err != nil {
		p.t.Fatal(err)
	}
	p.cmd.Process = process
}

func TestUpgradeUnderLoad(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 2, 200_000)
	recorded := filepath.Join(t.TempDir(), "traffic")
	told := filepath.Join(t.TempDir(), "access")
	file := fleet.configFile(t, "access_log: {file: "+told+"}\nindex: {snapshot: "+filepath.Join(t.TempDir(), "index")+"}\nrecording: {file: "+
		recorded+"}\ntimeouts: {serve_after_term: 500ms}\nlimits: {in_flight: 1000, connections: 1000}")
	p := startProgram(t, "--config", file.path)

	// Streams that last longer than the binary upgrade takes.
	var long sync.WaitGroup
	begun := make(chan struct{}, 10)
	for i := range cap(begun) {
		long.Go(func() {
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			prompt := fmt.Sprint("long stream ", i)
			if err := askStream(client, p.url, prompt, 3000, func() { begun <- struct{}{} }); err != nil {
				t.Errorf("%s: %v", prompt, err)
			}
			// The connection was kept from before.
			if err := askStream(client, p.url, prompt+" again", 8, nil); err != nil {
				t.Errorf("%s, once more: %v", prompt, err)
			}
		})
	}
	for range cap(begun) {
		<-begun
	}
	clients := p.startCrowd(16, &http.Transport{})
	clients.more(100)
	first := p.ended
	pid := p.upgrade()
	clients.more(100)
	long.Wait()
	clients.more(100)
	clients.leave()
	select {
	case <-first:
		if p.status != 0 {
			t.Errorf("the old process ended with status %d", p.status)
		}
	case <-time.After(time.Minute):
		t.Error("the old process did not end")
	}
	if log := p.log.String(); strings.Count(log, "msg=\"index restored") == 0 || strings.Contains(log, "level=WARN") ||
		strings.Contains(log, "level=ERROR") {
		t.Errorf("the log:\n%s", log)
	}
	lines, _ := os.ReadFile(told) // an event may bring many tokens, which count as one; the crowd gets answers of a few
	if n := len(regexp.MustCompile(`"output_tokens":([2-9]\d|\d{3,})`).FindAll(lines, -1)); n != cap(begun) {
		t.Errorf("the access log has %d of the %d requests that the old process finished", n, cap(begun))
	}
	p.eventually("the new process records", func() bool {
		traffic, _ := os.ReadFile(recorded)
		return strings.Count(string(traffic), `{"warmroute_record"`) == 2
	})
	// The new one can do all of it again.
	p.succeed(pid)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	p.signal(syscall.SIGUSR2)
	p.eventually("upgraded again", func() bool { return strings.Count(p.log.String(), `msg="binary upgrade done;`) == 2 })
	again := regexp.MustCompile(`msg="binary upgrade done;.* pid=(\d+)`).FindAllStringSubmatch(p.log.String(), -1)
	pid, _ = strconv.Atoi(again[1][1])
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	if err := askStream(client, p.url, "hello", 8, nil); err != nil {
		t.Error(err)
	}
}

func TestUpgradeChildFails(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	clients := p.startCrowd(8, &http.Transport{})
	file.write("routing: {policy: fastest}")
	p.signal(syscall.SIGUSR2)
	p.awaitLog(`msg="binary upgrade failed, this process keeps serving" err="the new process ended before it served: exit status 2"`)
	clients.more(100)
	clients.leave()
	file.write("")
	p.upgrade()
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	if err := askStream(http.DefaultClient, p.url, "hello", 8, nil); err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

// Replicas that connect to publish KV events do so again, to the new process.
func TestUpgradeWithKVEventListener(t *testing.T) {
	t.Parallel()
	address := "tcp://" + freeport.FindAddress(t)
	url, _ := startSimReplica(t, sim.Config{
		Engine: engine.Config{KVTokens: 200_000, Speed: 20}, KVEvents: sim.KVEventsConfig{Connect: address},
	}, "127.0.0.1:0")
	file := (&simFleet{urls: []string{url}}).configFile(t, "kv_events: {listen: \""+address+"\"}\ntimeouts: {serve_after_term: 500ms}")
	p := startProgram(t, "--config", file.path)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	checkReading := func(prompt string) {
		t.Helper()
		metric := func(name string) float64 { return metricSum(t, p.admin, "warmroute_kv_"+name) }
		p.eventually("the replica has connected", func() bool { return metric("event_connections") == 1 })
		if err := askStream(client, p.url, prompt, 40, nil); err != nil {
			t.Error(err)
		}
		p.eventually("its events are read", func() bool { return metric("event_connected_engines") == 1 && metric("blocks") > 0 })
	}
	checkReading(strings.Repeat("A prompt of many blocks. ", 20))
	p.succeed(p.upgrade())
	checkReading(strings.Repeat("Another prompt of many blocks. ", 20))
}

// activated starts the program as systemd does, but that a shell stands in for
// systemd's knowing the pid.
func activated(t *testing.T, names string, sockets []net.Listener, env []string, args ...string) *program {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" serve "$@"`, binary}, args...)...)
	for _, l := range sockets {
		file, err := l.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	cmd.Env = append(cmd.Environ(), "LISTEN_FDS="+strconv.Itoa(len(sockets)), "LISTEN_FDNAMES="+names)
	cmd.Env = append(cmd.Env, env...)
	return startCommand(t, cmd)
}

func TestSocketActivation(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	open := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	f := func(names string, public, admin int, sockets ...net.Listener) {
		t.Helper()
		p := activated(t, names, sockets, nil, "--config", fleet.configFile(t, "").path)
		if p.url != "http://"+sockets[public].Addr().String() {
			t.Errorf("%q: public is %s", names, p.url)
		}
		if admin >= 0 && p.admin != "http://"+sockets[admin].Addr().String() {
			t.Errorf("%q: admin is %s", names, p.admin)
		}
		if err := askStream(http.DefaultClient, p.url, "hello", 8, nil); err != nil {
			t.Errorf("%q: %v", names, err)
		}
		http.DefaultClient.CloseIdleConnections()
	}
	f("warmroute.socket", 0, -1, open())
	f("a.socket:b.socket", 0, 1, open(), open())
	f("admin:public", 1, 0, open(), open())
	f("admin:b.socket", 1, 0, open(), open())
}

func TestSystemdNotifications(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	path := filepath.Join(t.TempDir(), "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	next := func() string {
		t.Helper()
		message := make([]byte, 1000)
		told.SetReadDeadline(time.Now().Add(time.Minute))
		n, err := told.Read(message)
		if err != nil {
			t.Fatal(err)
		}
		return string(message[:n])
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	file := fleet.configFile(t, "")
	p := activated(t, "", []net.Listener{l}, []string{"NOTIFY_SOCKET=" + path}, "--config", file.path)
	if got := next(); got != "READY=1" {
		t.Errorf("got %q", got)
	}
	begun := regexp.MustCompile(`^RELOADING=1\nMONOTONIC_USEC=[1-9]\d{5,}\n$`)
	for _, reload := range []struct{ yaml, status string }{
		{"routing: {policy: least-load}", "READY=1\nSTATUS=serving"},
		{"routing: {policy: fastest}", "READY=1\nSTATUS=serving with the previous config: reload failed, see the log"},
		{"", "READY=1\nSTATUS=serving"},
	} {
		file.write(reload.yaml) // which is noticed; a signal would be one more reload
		if got := next(); !begun.MatchString(got) {
			t.Errorf("%q: got %q", reload.yaml, got)
		}
		if got := next(); got != reload.status {
			t.Errorf("%q: got %q", reload.yaml, got)
		}
	}
	pid := p.upgrade()
	got := []string{next(), next()} // of the new process, and of the old
	if want := "MAINPID=" + strconv.Itoa(pid); got[0] != "READY=1" || got[1] != want {
		t.Errorf("got %q", got)
	}
	p.exit()
	p.succeed(pid)
	p.signal(syscall.SIGINT)
	if got := next(); got != "STOPPING=1" {
		t.Errorf("got %q", got)
	}
}

func TestUpgradeHTTP2(t *testing.T) {
	t.Parallel()
	pair := newPEMPair(t)
	fleet := startSimFleet(t, 2, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, pair.yaml()+"timeouts: {serve_after_term: 300ms}").path)
	clients := p.startCrowd(8, pair.transport(true))
	clients.more(50)
	p.upgrade()
	clients.more(200)
	if status := p.exit(); status != 0 {
		t.Errorf("the old process ended with status %d", status)
	}
	clients.more(50)
	clients.leave()
}

// The two processes are one proxy: a request of the one that comes back to the
// other is found.
func TestUpgradeKeepsInstance(t *testing.T) {
	t.Parallel()
	p := startProgram(t, "--config", startSimFleet(t, 1, 200_000).configFile(t, "timeouts: {serve_after_term: 10ms}").path)
	instance := func() string {
		req, err := http.NewRequest(http.MethodGet, p.url+"/health", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(backends.InstanceHeader, "other")
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.Header.Get(backends.InstanceHeader)
	}
	before := instance()
	p.upgrade()
	p.exit() // the new process has the listener alone
	if after := instance(); before == "" || after != before {
		t.Errorf("instance %q before, %q after", before, after)
	}
}

// beginUpgrade begins one that comes to no end by itself, because the new process
// has a replica more, which never answers a check.
func (p *program) beginUpgrade(file *configFile) (pid int) {
	p.t.Helper()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { silent.Close() })
	file.write("health: {timeout: 10m}\nbackends: [" + strings.Join(file.fleet.urls, ", ") + ", http://" + silent.Addr().String() + "]")
	p.signal(syscall.SIGUSR2)
	pid, _ = strconv.Atoi(p.awaitLog(`msg="binary upgrade started" pid=(\d+)`))
	p.t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	p.awaitLog(`(?s)msg="binary upgrade started".*msg=listening admin=`)
	return pid
}

// A binary upgrade is under way when the old process is told to end: the new one, of
// which nobody knows yet, must not stay.
func TestStopDuringUpgrade(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	pid := p.beginUpgrade(file)
	p.signal(os.Interrupt)
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	p.eventually("the new process ends", func() bool { return syscall.Kill(pid, 0) != nil })
}

// The sockets are the old process's until the new one serves: what the new one
// accepted at its end would be refused.
func TestUpgradeChildStopped(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	pid := p.beginUpgrade(file)
	clients := p.startCrowd(8, &http.Transport{})
	clients.more(20)
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.awaitLog(`msg="binary upgrade failed, this process keeps serving" err="the new process ended before it served: exit status 0"`)
	clients.more(100)
	clients.leave()
	if log := p.log.String(); strings.Contains(log, "readiness fails") || strings.Contains(log, "shutting down") {
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
func TestUpgradeWithoutDrain(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 0}").path)
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
	p.upgrade()
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	more(100)
	close(over)
	clients.Wait()
}

// Another setting takes effect with a binary upgrade as with any start.
func TestUpgradeWithNewAddress(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	text, err := os.ReadFile(file.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file.path, []byte(strings.Replace(string(text), "listen: 127.0.0.1:0", "listen: localhost:0", 1)),
		0o600); err != nil {
		t.Fatal(err)
	}
	p.upgrade()
	public := p.awaitLog(`(?s)msg="binary upgrade started.*msg=listening public=(\S+)`)
	if old, admin := strings.TrimPrefix(p.url, "http://"),
		"http://"+p.awaitLog(`(?s)msg="binary upgrade started.*msg=listening admin=(\S+)`); public == old || admin != p.admin {
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
