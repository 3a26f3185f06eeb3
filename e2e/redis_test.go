//go:build redis

package e2e

import (
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// redisProcess is a redis-server on a Unix socket, without a disk.
type redisProcess struct {
	t      *testing.T
	socket string
	cmd    *exec.Cmd
}

func startRedis(t *testing.T) *redisProcess {
	t.Helper()
	r := &redisProcess{t: t, socket: filepath.Join(t.TempDir(), "redis.sock")}
	r.start()
	t.Cleanup(func() { r.kill() })
	return r
}

func (r *redisProcess) start() {
	r.t.Helper()
	r.cmd = exec.Command("redis-server", "--port", "0", "--unixsocket", r.socket, "--save", "", "--dir", filepath.Dir(r.socket))
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); r.run("PING") != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatal("redis-server does not answer")
		}
	}
}

func (r *redisProcess) kill() {
	r.cmd.Process.Kill()
	r.cmd.Wait()
}

func (r *redisProcess) run(command ...string) error {
	return exec.CommandContext(r.t.Context(), "redis-cli", append([]string{"-e", "-s", r.socket}, command...)...).Run()
}

// yaml is the part of a proxy's configuration that names it.
func (r *redisProcess) yaml() string { return fmt.Sprintf("redis: {url: %q}\n", "unix://"+r.socket) }

// awaitSharing waits until the proxies are connected and count each other.
func awaitSharing(t *testing.T, proxies ...*program) {
	t.Helper()
	for _, p := range proxies {
		p.eventually("it shares with the others", func() bool {
			return metricSum(t, p.admin, "warmroute_redis_connected") == 1 &&
				metricSum(t, p.admin, "warmroute_redis_proxies") == float64(len(proxies))
		})
	}
}

// TestRedisOutagesUnderLoad kills, suspends and fills up the Redis that two proxies share. Every
// request is answered.
func TestRedisOutagesUnderLoad(t *testing.T) {
	redis, fleet := startRedis(t), startSimFleet(t, 3, 0)
	var proxies []*program
	var crowds []*crowd
	for range 2 {
		proxies = append(proxies, startProgram(t, "--config", fleet.configFile(t, redis.yaml()).path))
	}
	awaitSharing(t, proxies...)
	for _, p := range proxies {
		c := p.startCrowd(8, &http.Transport{})
		defer c.leave()
		crowds = append(crowds, c)
	}
	more := func() {
		for _, c := range crowds {
			c.more(50)
		}
	}
	more()
	signal := func(s syscall.Signal) {
		if err := redis.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	command := func(args ...string) {
		if err := redis.run(args...); err != nil {
			t.Fatalf("%v: %v", args, err)
		}
	}
	for _, outage := range []struct{ begin, end func() }{
		{redis.kill, redis.start},
		{func() { signal(syscall.SIGSTOP) }, func() { signal(syscall.SIGCONT) }},
		{func() { command("CONFIG", "SET", "maxmemory", "1") }, func() { command("CONFIG", "SET", "maxmemory", "0") }},
	} {
		outage.begin()
		for _, p := range proxies {
			p.eventually("it notices the outage", func() bool { return metricSum(t, p.admin, "warmroute_redis_connected") == 0 })
		}
		more()
		outage.end()
		awaitSharing(t, proxies...)
		more()
	}
	for _, c := range crowds {
		c.leave()
	}
	for _, p := range proxies {
		for line := range strings.Lines(p.log.String()) {
			if !strings.HasPrefix(line, "time=") {
				t.Errorf("the client writes to the log: %s", line)
			}
		}
		p.eventually("nothing is in flight", func() bool {
			return metricSum(t, p.admin, "warmroute_redis_peer_requests_in_flight") == 0 &&
				metricSum(t, p.admin, "warmroute_requests_in_flight") == 0
		})
	}
}

// TestRedisWarmStart expects that a proxy that starts knows the prompts that another one was sent.
func TestRedisWarmStart(t *testing.T) {
	redis, fleet := startRedis(t), startSimFleet(t, 3, 0)
	first := startProgram(t, "--config", fleet.configFile(t, redis.yaml()).path)
	awaitSharing(t, first)
	const prompts = 20
	prompt := func(i int) string { return fmt.Sprintf("%d%01000d", i, 0) }
	for i := range prompts {
		if err := askStream(http.DefaultClient, first.url, prompt(i), 4, nil); err != nil {
			t.Fatal(err)
		}
	}
	first.eventually("all is written", func() bool { return metricSum(t, first.admin, "warmroute_redis_waiting_bytes") == 0 })
	blocks := metricSum(t, first.admin, "warmroute_index_blocks")
	second := startProgram(t, "--config", fleet.configFile(t, redis.yaml()).path)
	second.eventually("it knows the prompts", func() bool { return metricSum(t, second.admin, "warmroute_index_blocks") >= blocks })
}

// TestRedisStoredResponses sends the turns of conversations by previous_response_id to two
// proxies in turn, with an API key: a response that is not known would be refused.
func TestRedisStoredResponses(t *testing.T) {
	redis, fleet := startRedis(t), &simFleet{}
	for range 3 {
		url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}, StoreResponses: true}, "127.0.0.1:0")
		fleet.urls = append(fleet.urls, url)
	}
	var proxies []*program
	for range 2 {
		yaml := redis.yaml() + "keys: [{name: k, sha256: 2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683}]\n" // of "key"
		proxies = append(proxies, startProgram(t, "--config", fleet.configFile(t, yaml).path))
	}
	awaitSharing(t, proxies...)
	client := &http.Client{Transport: withKey{}}
	for i := range 20 {
		c := &statefulConversation{model: "sim"}
		for turn := range 4 {
			from, to := proxies[turn%2], proxies[(turn+1)%2]
			c.continueWith(t, client, from.url, i)
			if c.turns != turn+1 {
				t.Fatalf("conversation %d: turn %d failed", i, turn)
			}
			known := metricSum(t, from.admin, "warmroute_stored_responses")
			to.eventually("it knows the response", func() bool { return metricSum(t, to.admin, "warmroute_stored_responses") == known })
		}
	}
}

// withKey sends requests with the API key "key".
type withKey struct{}

func (withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer key")
	return http.DefaultTransport.RoundTrip(r)
}

// TestRedisSharesRegistrations expects registrations, removals and drains to be known to another proxy, to one that
// starts later, and to all after Redis has lost them.
func TestRedisSharesRegistrations(t *testing.T) {
	redis, fleet, registered := startRedis(t), startSimFleet(t, 1, 0), startSimFleet(t, 3, 0)
	start := func() *program {
		return startProgram(t, "--config", fleet.configFile(t, redis.yaml()+registrationYAML).path)
	}
	first, second := start(), start()
	awaitSharing(t, first, second)
	for _, replica := range registered.urls {
		first.register(replica)
	}
	want := map[string]string{backendName(fleet.urls[0]): "ready"}
	for _, replica := range registered.urls {
		want[backendName(replica)] = "ready"
	}
	second.awaitStates(want)
	second.expectStatus(http.StatusOK, http.MethodDelete, second.url+"/workers/"+backendName(registered.urls[0]), "")
	delete(want, backendName(registered.urls[0]))
	second.drain(backendName(registered.urls[1]))
	want[backendName(registered.urls[1])] = "draining"
	first.awaitStates(want)
	second.signal(syscall.SIGKILL)
	third := start()
	third.awaitStates(want)
	redis.kill()
	redis.start()
	awaitSharing(t, first, third)
	fourth := start()
	fourth.awaitStates(want)
}
