package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/lab/freeport"
	"warmroute/lab/sim"
)

// ignoreCleaner ignores the goroutines that close idle connections, which end within timeouts.keepalive_idle after the
// last connection to a replica.
var ignoreCleaner = goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner")

// outage is a proxy with its default settings in front of simulated replicas
// that come and go.
type outage struct {
	t          *testing.T
	url, admin string
	replicas   []string
	kill       []func()
	stop       func()
}

func startOutage(t *testing.T, replicas int) *outage {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before, ignoreCleaner) })
	o := &outage{t: t}
	for range replicas {
		url, kill := startSimReplica(t, sim.Config{}, freeport.FindAddress(t))
		o.replicas, o.kill = append(o.replicas, url), append(o.kill, kill)
	}
	proxy, stop := startServer(t, o.replicas...)
	o.url, o.admin, o.stop = "http://"+proxy.Addr().String(), "http://"+proxy.AdminAddr().String(), stop
	o.awaitReady(replicas)
	return o
}

func (o *outage) restart(i int) {
	_, o.kill[i] = startSimReplica(o.t, sim.Config{}, strings.TrimPrefix(o.replicas[i], "http://"))
}

func (o *outage) awaitReady(n int) {
	o.t.Helper()
	o.await(fmt.Sprint(n, " replicas are ready"), "warmroute_backend_ready", func(v float64) bool { return v == float64(n) })
}

func (o *outage) await(what, metric string, is func(float64) bool) {
	o.t.Helper()
	for end := time.Now().Add(time.Minute); !is(metricSum(o.t, o.admin, metric)); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			o.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// ask sends a request for a whole answer, and fails the test unless it comes.
func (o *outage) ask(name string) {
	body := fmt.Appendf(nil, `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"%s %s"}]}`, name, words(100))
	req, _ := http.NewRequest(http.MethodPost, o.url+"/v1/chat/completions", bytes.NewReader(body))
	req.Close = true
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		o.t.Errorf("%s: %v", name, err)
		return
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		o.t.Errorf("%s: %d, %v, %s", name, resp.StatusCode, err, answer)
	}
}

func TestRequestsWaitForFleetOutage(t *testing.T) {
	o := startOutage(t, 2)
	for _, kill := range o.kill {
		kill()
	}
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() { o.ask(fmt.Sprint("request ", i)) })
	}
	o.await("all requests are held", "warmroute_queue_requests", func(v float64) bool { return v == 20 })
	time.Sleep(2 * time.Second) // the outage
	o.restart(0)
	o.restart(1)
	all.Wait()
	o.await("none is held", "warmroute_queue_requests", func(v float64) bool { return v == 0 })
}

func TestShutdownWithDownBackends(t *testing.T) {
	o := startOutage(t, 1)
	o.kill[0]()
	codes := make(chan int, 5)
	for range cap(codes) {
		go func() {
			body := strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":"hello"}]}`)
			resp, err := http.Post(o.url+"/v1/chat/completions", "application/json", body)
			if err != nil {
				codes <- 0
				return
			}
			resp.Body.Close()
			codes <- resp.StatusCode
		}()
	}
	o.await("all requests are held", "warmroute_queue_requests", func(v float64) bool { return v == float64(cap(codes)) })
	o.stop() // fails the test when unfinished requests had to be ended
	for range cap(codes) {
		if code := <-codes; code != http.StatusServiceUnavailable {
			t.Errorf("got %d, want a 503", code)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestRollingRestartOfReplicas(t *testing.T) {
	o := startOutage(t, 2)
	var over atomic.Bool
	var asked atomic.Int64
	var clients sync.WaitGroup
	for client := range 8 {
		clients.Go(func() {
			for n := 0; !over.Load(); n++ {
				o.ask(fmt.Sprintf("client %d, request %d", client, n))
				asked.Add(1)
			}
		})
	}
	for i := range o.replicas {
		o.await("requests are in flight", "warmroute_backend_in_flight", func(v float64) bool { return v > 0 })
		o.kill[i]()
		o.awaitReady(1)
		before := asked.Load()
		o.await("requests are answered meanwhile", "warmroute_backend_ready", func(float64) bool { return asked.Load() > before+20 })
		o.restart(i)
		o.awaitReady(2)
	}
	over.Store(true)
	clients.Wait()
}
