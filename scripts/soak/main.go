// Command soak keeps a proxy under an hour's worth of mixed traffic, squeezed to
// ten minutes, and looks whether anything of it stays: memory, goroutines,
// descriptors and requests in flight have to be flat at the end.
//
//	go run ./scripts/soak             ten minutes
//	go run ./scripts/soak --for 1m
//	go run ./scripts/soak --tls       clients by TLS, a third of them over HTTP/2
//
// Clients come and go: some leave in every phase, read slowly or not at all, send
// slowly, send too much or nonsense, each model and endpoint, streamed and not,
// on new connections and old ones, with keys whose bounds they exceed, while
// replicas are killed and restarted, drained, removed and added by reloads, and
// the metrics are scraped. Exit status 1: something grew, or was lost.
package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"warmroute/scripts/testbed"
)

func main() { testbed.Main("soak", run) }

// report is what a run came to.
type report struct {
	Seconds float64        `json:"seconds"`
	Sent    map[string]int `json:"sent"`   // by kind
	Failed  map[string]int `json:"failed"` // by kind and cause
	Broken  int            `json:"streams_broken_off_by_restarts"`
	Over    int            `json:"beyond_the_bounds_of_a_key"`
	// Operated is what was done to the fleet meanwhile, and how often.
	Operated map[string]int `json:"operated"`
	Samples  []sample       `json:"samples"`
	Faults   []string       `json:"faults"`
	OK       bool           `json:"ok"`
}

func run(ctx context.Context) (ok bool, err error) {
	binary := flag.String("binary", "", "warmroute, built; none: it is built from this directory")
	length := flag.Duration("for", 10*time.Minute, "how long")
	users := flag.Int("users", 120, "clients at once")
	secure := flag.Bool("tls", false, "clients come by TLS with a certificate made for this, a third of them over HTTP/2")
	asJSON := flag.Bool("json", false, "print one JSON object at the end")
	flag.Parse()
	if *length < 20*time.Second || *users < 1 {
		return false, errors.New("-for must be 20s at least, and -users 1")
	}
	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		return false, err
	}
	if *binary == "" {
		*binary = filepath.Join(dir, "warmroute")
		if err := testbed.Build(ctx, *binary); err != nil {
			return false, err
		}
	}
	r, err := soak(ctx, *binary, dir, *length, *users, *secure, *asJSON)
	if err != nil {
		return false, fmt.Errorf("%w; logs are in %s", err, dir)
	}
	if *asJSON {
		err = json.NewEncoder(os.Stdout).Encode(r)
	} else {
		r.print()
	}
	if !r.OK {
		fmt.Fprintln(os.Stderr, "logs are in", dir)
		return false, err
	}
	return true, errors.Join(err, os.RemoveAll(dir))
}

// soak plays the load for so long and looks at the proxy all the while.
func soak(ctx context.Context, binary, dir string, length time.Duration, users int, secure, quiet bool) (r *report, err error) {
	var roots *x509.CertPool
	if secure {
		if roots, err = certify(dir); err != nil {
			return nil, err
		}
	}
	proxy, replicas, err := start(ctx, binary, dir, settings(dir, users, secure), roots)
	defer func() {
		if proxy != nil {
			err = errors.Join(err, proxy.End(time.Minute))
		}
		for _, one := range replicas {
			if one.Runs() {
				err = errors.Join(err, testbed.Kill(one))
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	r = &report{}
	tell := func(s sample) {
		r.Samples = append(r.Samples, s)
		if !quiet {
			s.print(len(r.Samples) == 1)
		}
	}
	idle, err := look(ctx, proxy, io.Discard)
	if err != nil {
		return nil, err
	}
	idle.At = "before"
	tell(idle)

	began := time.Now()
	loaded, done := context.WithTimeout(ctx, length)
	defer done()
	o := &outcomes{sent: map[string]int{}, failed: map[string]int{}}
	var playing sync.WaitGroup
	playing.Go(func() { play(loaded, proxy.URL, users, roots, o) })
	ops := &operator{proxy: proxy, replicas: replicas, done: map[string]int{}}
	var operated error
	playing.Go(func() { operated = ops.work(loaded, max(length/60, 4*time.Second)) })
	var under []sample
	for _, percent := range []int{20, 60, 100} {
		s, err := around(loaded, proxy, began.Add(length*time.Duration(percent)/100), length/10)
		if err != nil {
			done()
			playing.Wait()
			return nil, errors.Join(err, ctx.Err())
		}
		s.At = fmt.Sprint(percent, " %")
		tell(s)
		under = append(under, s)
	}
	playing.Wait()
	if err := errors.Join(operated, ctx.Err()); err != nil {
		return nil, err
	}
	after, err := settled(ctx, proxy, idle, filepath.Join(dir, "after.heap"))
	if err != nil {
		return nil, err
	}
	tell(after)
	r.Seconds = time.Since(began).Seconds()
	r.Sent, r.Failed, r.Broken, r.Over, r.Operated = o.sent, o.failed, o.broken, o.over, ops.done
	r.Faults = append(faults(idle, under[1], under[2], after), o.first...)
	r.OK = len(r.Faults) == 0
	return r, nil
}

// around is the median of the last while before an instant.
func around(ctx context.Context, p *testbed.Proxy, until time.Time, last time.Duration) (sample, error) {
	if !wait(ctx, time.Until(until)-last) {
		return sample{}, ctx.Err()
	}
	var all []sample
	for gap := last / 8; time.Until(until) > gap; {
		s, err := look(ctx, p, io.Discard)
		if err != nil {
			return sample{}, err
		}
		all = append(all, s)
		if !wait(ctx, gap) {
			break
		}
	}
	if len(all) == 0 {
		return sample{}, errors.New("the machine is too busy to look at the proxy")
	}
	return median("", all), nil
}

// settleLimit is for what the load has left to go: connections to replicas are
// kept for four seconds, and a client that stalls is waited for.
const settleLimit = 30 * time.Second

// settled looks until nothing is left of the load, or it has had its time. The
// last heap profile is kept in a file.
func settled(ctx context.Context, p *testbed.Proxy, idle sample, file string) (s sample, err error) {
	for end := time.Now().Add(settleLimit); time.Now().Before(end); {
		var profile bytes.Buffer
		if s, err = look(ctx, p, &profile); err != nil {
			return s, err
		}
		if err := os.WriteFile(file, profile.Bytes(), 0o600); err != nil {
			return s, err
		}
		if s.InFlight == 0 && s.Goroutines <= idle.Goroutines+left && s.Descriptors <= idle.Descriptors+left {
			break
		}
		if !wait(ctx, 500*time.Millisecond) {
			return s, ctx.Err()
		}
	}
	s.At = "after"
	return s, nil
}

// start brings replicas and proxy up. What it returns has to be ended.
func start(ctx context.Context, binary, dir, settings string, roots *x509.CertPool) (*testbed.Proxy, []*testbed.Replica, error) {
	ports, err := testbed.FreePorts(6)
	if err != nil {
		return nil, nil, err
	}
	var replicas []*testbed.Replica
	for i, port := range ports[2:] {
		// Six times as fast as real ones, and with caches that are soon full, and
		// the index with them.
		args := []string{"--speed", "6", "--kv-tokens", "150000"}
		if i == 3 {
			args = append(args, "--model", "other")
		} else {
			args = append(args, "--adapter", "sql")
		}
		replicas = append(replicas, testbed.Simulated(binary, dir, fmt.Sprint("r", i), port, i == 1, args...))
	}
	for _, one := range replicas {
		if err := one.Start(); err != nil {
			return nil, replicas, err
		}
	}
	for _, one := range replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return nil, replicas, err
		}
	}
	proxy := testbed.NewProxy(binary, dir, ports[0], ports[1], settings)
	if roots != nil {
		proxy.SpeakTLS(roots)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "keys"), []byte("free "+freeKey+"\nbounded "+boundedKey+"\n"), 0o600), proxy.Configure(replicas)); err != nil {
		return nil, replicas, err
	}
	return proxy, replicas, proxy.Start(ctx)
}

func (s sample) print(first bool) {
	if first {
		fmt.Printf("%8s %8s %8s %11s %12s %10s\n", "", "RSS, MB", "heap, MB", "goroutines", "descriptors", "in flight")
	}
	fmt.Printf("%8s %8.1f %8.1f %11.0f %12.0f %10.0f\n", s.At, s.RSS, s.Heap, s.Goroutines, s.Descriptors, s.InFlight)
}

func (r *report) print() {
	fmt.Println()
	total := 0
	for _, name := range slices.Sorted(maps.Keys(r.Sent)) {
		fmt.Printf("%7d %s\n", r.Sent[name], name)
		total += r.Sent[name]
	}
	fmt.Printf("%7d in all in %.0f s, %d streams broken off by restarts, %d beyond the bounds of their key\n", total, r.Seconds, r.Broken, r.Over)
	for _, what := range slices.Sorted(maps.Keys(r.Operated)) {
		fmt.Printf("%7d × %s\n", r.Operated[what], what)
	}
	for _, what := range slices.Sorted(maps.Keys(r.Failed)) {
		fmt.Printf("FAILED %d: %s\n", r.Failed[what], what)
	}
	for _, f := range r.Faults {
		fmt.Println("  !", f)
	}
	if r.OK {
		fmt.Println("nothing grew and nothing was lost")
	}
}
