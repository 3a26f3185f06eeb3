package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	soakUsers       = 120
	soakThinkTime   = 200 * time.Millisecond // mean, between two requests of a user
	soakIdleTimeout = 30 * time.Second       // for connections and stalled clients to end after the load
	minSoak         = 20 * time.Second

	// The API keys of the users: a quarter of them has the one with limits, which
	// they exceed now and then.
	unlimitedKey = "soak-unlimited-0123456789abcdef"
	limitedKey   = "soak-limited-0123456789abcdef"
)

// resources are what is measured of the proxy, in the order of usage, with the
// largest growth that is not a leak: under load between 60 % and 100 % of the time,
// where what is in flight varies by chance, and after the load against before it.
var resources = [...]struct {
	name                string
	maxRatio, maxGrowth float64 // under load: value × maxRatio + maxGrowth
	maxLeft             float64 // after the load: more than before
}{
	{"RSS, MB", 1.15, 16, math.Inf(1)},
	{"heap, MB", 1.15, 16, 8}, // live after a garbage collection; what was learned stays
	{"goroutines", 1.25, 20, 10},
	{"descriptors", 1.25, 20, 10},
	{"in flight", math.Inf(1), 0, 0}, // queued requests included
}

type usage [len(resources)]float64

// usageSample is the usage at one moment of the soak, or the median around it.
type usageSample struct {
	At    string `json:"at"`
	Usage usage  `json:"usage"`
}

// soakReport is the result of a soak.
type soakReport struct {
	Seconds      float64        `json:"seconds"`
	Sent         map[string]int `json:"sent"`   // by kind of request
	Failed       map[string]int `json:"failed"` // by kind and cause
	StreamErrors int            `json:"streams_ended_by_restarts"`
	OverLimit    int            `json:"over_key_limits"`
	Operations   map[string]int `json:"operations"`
	Resources    []string       `json:"resources"` // that a usage lists
	Samples      []usageSample  `json:"samples"`
	Violations   []string       `json:"violations"`
	OK           bool           `json:"ok"`

	mu sync.Mutex // guards Sent, Failed, StreamErrors, OverLimit and Violations
}

// runSoak sends mixed traffic for a time, restarts and reconfigures replicas
// meanwhile, and reports whether the proxy's resources grew or a request failed.
func (o *options) runSoak(ctx context.Context, dir string) (ok bool, err error) {
	if o.soak < minSoak {
		return false, fmt.Errorf("-soak %v is below %v", o.soak, minSoak)
	}
	var roots *x509.CertPool
	if o.tls {
		if roots, err = writeCertificate(dir); err != nil {
			return false, err
		}
	}
	r, err := o.startSoakRig(ctx, dir, roots)
	defer func() { err = errors.Join(err, r.endProcesses()) }()
	if err != nil {
		return false, err
	}
	report := &soakReport{Sent: map[string]int{}, Failed: map[string]int{}, Operations: map[string]int{}}
	for _, one := range resources {
		report.Resources = append(report.Resources, one.name)
	}
	if err := r.sendTrafficAndOperate(ctx, report, o.soak, roots, o.asJSON); err != nil {
		return false, err
	}
	report.OK = len(report.Violations) == 0
	if o.asJSON {
		return report.OK, json.NewEncoder(os.Stdout).Encode(report)
	}
	report.print()
	return report.OK, nil
}

// startSoakRig starts four replicas that run six times as fast as real ones, with small
// caches, so that these and the index are soon full. The last has a model of its own.
func (o *options) startSoakRig(ctx context.Context, dir string, roots *x509.CertPool) (*rig, error) {
	r := o.newRig(dir)
	ports, err := testbed.FreePorts(6)
	if err != nil {
		return r, err
	}
	for i, port := range ports[2:] {
		args := []string{"--speed", "6", "--kv-tokens", "150000", "--adapter", "sql"}
		if i == 3 {
			args = append(args[:4], "--model", "other")
		}
		r.replicas = append(r.replicas, testbed.NewSimulatedReplica(o.binary, dir, fmt.Sprint("r", i), port, i == 1, args...))
	}
	keys := filepath.Join(dir, "keys")
	if err := os.WriteFile(keys, []byte("unlimited "+unlimitedKey+"\nlimited "+limitedKey+"\n"), 0o600); err != nil {
		return r, err
	}
	settings := fmt.Sprintf(`
limits: {body_bytes: %d}
timeouts: {body_idle: %v, write_idle: %v}
sse: {keepalive: 1s}
keys: [{name: limited, requests_per_minute: %d, concurrency: %d}]
keys_file: %q`, soakBodyBytes, soakBodyIdleTimeout, soakWriteIdleTimeout, 15*soakUsers, soakUsers/5+1, keys)
	if roots != nil {
		settings += fmt.Sprintf("\ntls: {cert_file: %q, key_file: %q}", filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	}
	r.proxy = testbed.NewProxy(o.binary, dir, ports[0], ports[1], settings)
	if roots != nil {
		r.proxy.EnableTLS(roots)
	}
	return r, r.startAndAwaitAll(ctx)
}

// writeCertificate writes the certificate of net/http/httptest, which is valid for
// 127.0.0.1, to cert.pem and key.pem in dir and returns a pool that trusts it.
func writeCertificate(dir string) (*x509.CertPool, error) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	key, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	return roots, errors.Join(
		os.WriteFile(filepath.Join(dir, "cert.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600),
		os.WriteFile(filepath.Join(dir, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))
}

// sendTrafficAndOperate runs the traffic and the operations, and fills in the report.
func (r *rig) sendTrafficAndOperate(ctx context.Context, report *soakReport, length time.Duration, roots *x509.CertPool,
	printNothing bool) error {
	add := func(at string, u usage) usage {
		report.Samples = append(report.Samples, usageSample{at, u})
		if !printNothing {
			printUsage(at, u, len(report.Samples) == 1)
		}
		return u
	}
	before, err := r.collectGarbageAndMeasure(ctx)
	if err != nil {
		return err
	}
	add("before", before)

	began := time.Now()
	loaded, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { report.runUsers(loaded, r.proxy.URL, roots) })
	operated := make(chan error, 1)
	running.Go(func() { operated <- r.operateUntilDone(loaded, max(length/60, 4*time.Second), report.Operations) })
	var under []usage
	for _, percent := range []int{20, 60, 100} {
		u, err := r.awaitMedianUsage(loaded, began.Add(length*time.Duration(percent)/100), length/10)
		if err != nil {
			return errors.Join(err, ctx.Err())
		}
		under = append(under, add(fmt.Sprint(percent, " %"), u))
	}
	running.Wait()
	if err := errors.Join(<-operated, ctx.Err()); err != nil {
		return err
	}
	after, err := r.awaitIdleUsage(ctx, before)
	if err != nil {
		return err
	}
	add("after", after)
	report.Seconds = time.Since(began).Seconds()
	report.Violations = append(findGrowth(before, under[1], under[2], after), report.Violations...)
	return nil
}

// operateUntilDone restarts, kills, drains and removes replicas in turn, never more than one
// at a time, until ctx is done. It completes what it has begun.
func (r *rig) operateUntilDone(ctx context.Context, interval time.Duration, counts map[string]int) error {
	pause := func() { testbed.Sleep(ctx, interval/2) }
	for n := 0; testbed.Sleep(ctx, interval/2) == nil; n++ {
		name, err := r.operateOnce(context.WithoutCancel(ctx), n, pause)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		counts[name]++
	}
	return nil
}

// operateOnce does operation n to one replica and undoes it after pause.
func (r *rig) operateOnce(ctx context.Context, n int, pause func()) (name string, err error) {
	turn := n / 4
	target := r.replicas[turn%len(r.replicas)]
	// The last replica alone has its model: while it restarts, requests wait, but
	// without it they fail.
	shared := turn % (len(r.replicas) - 1)
	switch n % 4 {
	case 0:
		return "replica restarted", r.endAndRestart(ctx, target, target.TerminateAndWait, pause)
	case 1:
		var changed []*testbed.Replica
		for i, one := range r.replicas {
			if i != shared {
				heavy := *one
				heavy.Settings = "weight: 2"
				changed = append(changed, &heavy)
			}
		}
		err = r.proxy.Reload(ctx, "ok", changed, "routing: {policy: least-load}")
		pause()
		return "configuration reloaded and restored", errors.Join(err, r.proxy.Reload(ctx, "ok", r.replicas))
	case 2:
		return "replica killed", r.endAndRestart(ctx, target, func() error { return testbed.KillAndWait(target) }, pause)
	default:
		path := "/api/backends/" + r.replicas[shared].Name
		err = r.proxy.PostAdmin(ctx, path+"/drain")
		pause()
		return "replica drained", errors.Join(err, r.proxy.PostAdmin(ctx, path+"/undrain"))
	}
}

// endAndRestart ends a replica and starts it again after pause.
func (r *rig) endAndRestart(ctx context.Context, replica *testbed.Replica, end func() error, pause func()) error {
	if err := end(); err != nil {
		return err
	}
	pause()
	return r.startAndAwaitHealthy(ctx, []*testbed.Replica{replica})
}

// runUsers sends requests until ctx is done, and waits for the last responses. With
// roots users connect with TLS, a third of them over HTTP/2.
func (s *soakReport) runUsers(ctx context.Context, url string, roots *x509.CertPool) {
	var users sync.WaitGroup
	for i := range soakUsers {
		users.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			client := newSoakClient(i%4 == 0, roots, i%3 == 0)
			defer client.CloseIdleConnections()
			key, limited := unlimitedKey, i/4%4 == 1
			if limited {
				key = limitedKey
			}
			user := &loadgen.Client{URL: url, APIKey: key, HTTP: client, Speed: 1, Timeout: 2 * time.Minute}
			for testbed.Sleep(ctx, time.Duration(random.ExpFloat64()*float64(soakThinkTime))) == nil {
				kind := drawKind(random)
				request := kind.newRequest(random)
				// Not under ctx: requests in flight at the end must complete.
				s.countResponse(kind, request, limited, user.Send(context.WithoutCancel(ctx), request))
			}
		})
	}
	users.Wait()
}

// newSoakClient returns a client with a small receive buffer, so that a client that
// does not read stops the sender. With churn it makes a connection per request.
func newSoakClient(churn bool, roots *x509.CertPool, http2 bool) *http.Client {
	client := loadgen.NewHTTPClient()
	transport := client.Transport.(*http.Transport)
	transport.DisableKeepAlives = churn
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	transport.ForceAttemptHTTP2 = http2 && roots != nil
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		if err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(8 << 10)
		}
		return conn, err
	}
	return client
}

// maxUnreadBody is how much of a refused body the proxy reads: the client of a longer
// one may see only that the connection was closed.
const maxUnreadBody = 256 << 10

// countResponse counts a response. Safe for concurrent use.
func (s *soakReport) countResponse(k *requestKind, request loadgen.Request, limited bool, r loadgen.Response) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Sent[k.name]++
	switch {
	case limited && (r.Err == "status 429" || r.Err == loadgen.NoConnection && len(request.Body) > maxUnreadBody):
		s.OverLimit++
	case slices.Contains(k.allowed, r.Err):
	case request.Stream && r.Committed && r.Err == loadgen.StreamError:
		s.StreamErrors++
	default:
		s.Failed[k.name+": "+r.Err]++
		if len(s.Violations) < 10 {
			s.Violations = append(s.Violations, fmt.Sprintf("%s: %s (status %d, from %q, after %v): %s",
				k.name, r.Err, r.Status, r.Backend, time.Since(r.Sent).Round(time.Millisecond), r.Detail))
		}
	}
}

// collectGarbageAndMeasure collects the proxy's garbage, writes the heap profile to soak.heap
// for go tool pprof, and returns the usage.
func (r *rig) collectGarbageAndMeasure(ctx context.Context) (usage, error) {
	var profile []byte
	for range 2 { // what is in a sync.Pool survives one collection
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.proxy.Admin+"/debug/pprof/heap?gc=1", nil)
		if err != nil {
			return usage{}, err
		}
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return usage{}, err
		}
		profile, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return usage{}, err
		}
		if resp.StatusCode != http.StatusOK {
			return usage{}, fmt.Errorf("%s: status %d", req.URL, resp.StatusCode)
		}
	}
	if err := os.WriteFile(filepath.Join(r.dir, "soak.heap"), profile, 0o600); err != nil {
		return usage{}, err
	}
	const mb = 1 << 20
	m, err := r.proxy.ReadMetrics(ctx)
	return usage{
		m.Sum("process_resident_memory_bytes") / mb,
		m.Sum("go_memstats_heap_alloc_bytes") / mb,
		m.Sum("go_goroutines"),
		m.Sum("process_open_fds"),
		m.Sum("warmroute_backend_in_flight") + m.Sum("warmroute_queue_requests"),
	}, err
}

// awaitMedianUsage waits, and returns the median of each resource in the window before end.
func (r *rig) awaitMedianUsage(ctx context.Context, end time.Time, window time.Duration) (median usage, err error) {
	if err := testbed.Sleep(ctx, time.Until(end)-window); err != nil {
		return usage{}, err
	}
	var samples []usage
	for interval := window / 8; time.Until(end) > interval; {
		u, err := r.collectGarbageAndMeasure(ctx)
		if err != nil {
			return usage{}, err
		}
		samples = append(samples, u)
		if testbed.Sleep(ctx, interval) != nil {
			break
		}
	}
	if len(samples) == 0 {
		return usage{}, errors.New("the machine is too busy to measure the proxy")
	}
	for i := range median {
		slices.SortFunc(samples, func(a, b usage) int { return cmp.Compare(a[i], b[i]) })
		median[i] = samples[len(samples)/2][i]
	}
	return median, nil
}

// awaitIdleUsage waits, at most soakIdleTimeout, until nothing is left of the load,
// and returns the usage.
func (r *rig) awaitIdleUsage(ctx context.Context, before usage) (u usage, err error) {
	for end := time.Now().Add(soakIdleTimeout); time.Now().Before(end); {
		if u, err = r.collectGarbageAndMeasure(ctx); err != nil || len(findGrowth(before, u, u, u)) == 0 {
			return u, err
		}
		if err := testbed.Sleep(ctx, 500*time.Millisecond); err != nil {
			return u, err
		}
	}
	return u, nil
}

// findGrowth returns the resources that grew under load, between middle and end, and
// those that were not released after it.
func findGrowth(before, middle, end, after usage) (found []string) {
	check := func(name, when string, got, maximum float64) {
		if got > maximum {
			found = append(found, fmt.Sprintf("%s %s: %.1f, maximum %.1f", name, when, got, maximum))
		}
	}
	for i, one := range resources {
		if !math.IsInf(one.maxRatio, 1) {
			check(one.name, "at the end", end[i], middle[i]*one.maxRatio+one.maxGrowth)
		}
		check(one.name, "after the load", after[i], before[i]+one.maxLeft)
	}
	return found
}

func printUsage(at string, u usage, header bool) {
	if header {
		fmt.Printf("%8s", "")
		for _, one := range resources {
			fmt.Printf("%13s", one.name)
		}
		fmt.Println()
	}
	fmt.Printf("%8s%13.1f%13.1f%13.0f%13.0f%13.0f\n", at, u[0], u[1], u[2], u[3], u[4])
}

func (s *soakReport) print() {
	fmt.Println()
	total := 0
	for _, name := range slices.Sorted(maps.Keys(s.Sent)) {
		fmt.Printf("%7d %s\n", s.Sent[name], name)
		total += s.Sent[name]
	}
	fmt.Printf("%7d requests in %.0f s, %d streams ended by restarts, %d over the limits of their key\n", total, s.Seconds, s.StreamErrors,
		s.OverLimit)
	for _, name := range slices.Sorted(maps.Keys(s.Operations)) {
		fmt.Printf("%7d × %s\n", s.Operations[name], name)
	}
	for _, what := range slices.Sorted(maps.Keys(s.Failed)) {
		fmt.Printf("FAILED %d: %s\n", s.Failed[what], what)
	}
	for _, v := range s.Violations {
		fmt.Println("  !", v)
	}
	if s.OK {
		fmt.Println("nothing grew and no request was lost")
	}
}
