package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"warmroute/lab/testbed"
)

// row is the result of a scenario.
type row struct {
	Scenario       string             `json:"scenario"`
	Seconds        float64            `json:"seconds"`
	Sent           int                `json:"sent"`
	Completed      int                `json:"completed"`
	Failed         map[string]int     `json:"failed"`      // by cause
	Retried        int                `json:"retried"`     // failed attempts that were retried
	Recovered      map[string]float64 `json:"recovered_s"` // by replica, the longest time from its recovery to its first traffic
	ViolationCount int                `json:"violations"`
	Violations     []string           `json:"first_violations,omitempty"`
	Measured       []string           `json:"measured,omitempty"`
}

// report is the result of a run.
type report struct {
	Rows []row `json:"scenarios"`
	// Before the load and after it.
	Goroutines  [2]float64 `json:"goroutines"`
	Descriptors [2]float64 `json:"descriptors"`
	InFlight    float64    `json:"in_flight"`
	Leak        string     `json:"leak,omitempty"` // what was not released
	OK          bool       `json:"ok"`

	out   io.Writer
	quiet bool // no output before finish
}

// runScenario runs one scenario and returns its result.
func (r *rig) runScenario(ctx context.Context, s scenario, load *clients) (row, error) {
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return row{}, err
	}
	begun, err := r.readExecutions(ctx)
	if err != nil {
		return row{}, err
	}
	r.countExecutions = false
	r.verdict, r.recovered = newVerdict(s.allowed), map[string]time.Duration{}
	began := time.Now()
	if s.alone {
		err = s.act(ctx, r)
	} else {
		err = r.actUnderLoad(ctx, s, load)
	}
	if ctx.Err() != nil {
		return row{}, ctx.Err()
	}
	// A failed action counts as a violation; the next scenario needs a complete fleet.
	r.verdict.require(err == nil, "%v", err)
	if err := errors.Join(r.restoreReplicas(ctx), r.awaitProxyIdle(ctx)); err != nil {
		return row{}, fmt.Errorf("%s: %w", s.name, err)
	}
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return row{}, err
	}
	const retries, started = "warmroute_retries_total", "process_start_time_seconds"
	retried := after.Sum(retries)
	if after.Sum(started) == before.Sum(started) { // the counter of a new process starts at 0
		retried -= before.Sum(retries)
	}
	v := r.verdict
	if r.countExecutions {
		asked := after.Sum("warmroute_requests_total") - before.Sum("warmroute_requests_total")
		v.require(asked <= float64(v.sent), "%d requests were sent, but the proxy counted %v", v.sent, asked)
		now, err := r.readExecutions(ctx)
		if err != nil {
			return row{}, err
		}
		v.require(now-begun <= float64(v.sent)+retried, "the replicas executed %v requests: more than the %d sent and the %v counted retries",
			now-begun, v.sent, retried)
	}
	out := row{
		Scenario: s.name, Seconds: time.Since(began).Seconds(), Sent: v.sent, Completed: v.completed, Failed: v.failed,
		Retried:   int(retried),
		Recovered: map[string]float64{}, ViolationCount: v.violationCount, Violations: v.violations, Measured: v.measurements,
	}
	for name, took := range r.recovered {
		out.Recovered[name] = took.Seconds()
	}
	return out, nil
}

// actUnderLoad runs the clients before, during and after a scenario's actions.
func (r *rig) actUnderLoad(ctx context.Context, s scenario, load *clients) error {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		load.sendUntil(ctx, stop, r.verdict.checkAndCount)
	}()
	defer func() { close(stop); <-stopped }()
	if err := r.awaitResponses(ctx, 2*load.number); err != nil { // the load has begun
		return err
	}
	if err := s.act(ctx, r); err != nil {
		return err
	}
	return r.awaitResponses(ctx, 2*load.number) // the fleet has recovered
}

// addAndPrint adds the result of a scenario and prints it unless p is quiet.
func (p *report) addAndPrint(r row) {
	p.Rows = append(p.Rows, r)
	if p.quiet {
		return
	}
	if len(p.Rows) == 1 {
		fmt.Fprintf(p.out, "%-16s %7s %9s %7s %8s %9s  %s\n", "", "sent", "completed", "failed", "retried", "recovered", "")
	}
	failed, recovered := 0, 0.0
	for _, n := range r.Failed {
		failed += n
	}
	for _, took := range r.Recovered {
		recovered = max(recovered, took)
	}
	recovery := "-"
	if len(r.Recovered) > 0 {
		recovery = fmt.Sprintf("%.1f s", recovered)
	}
	verdict := "ok"
	if r.ViolationCount > 0 {
		verdict = fmt.Sprint(r.ViolationCount, " VIOLATIONS")
	}
	fmt.Fprintf(p.out, "%-16s %7d %9d %7d %8d %9s  %s\n", r.Scenario, r.Sent, r.Completed, failed, r.Retried, recovery, verdict)
	for _, cause := range slices.Sorted(maps.Keys(r.Failed)) {
		fmt.Fprintf(p.out, "%-16s %s: %d\n", "", cause, r.Failed[cause])
	}
	for _, what := range r.Measured {
		fmt.Fprintf(p.out, "%-16s %s\n", "", what)
	}
	for _, what := range r.Violations {
		fmt.Fprintf(p.out, "  ! %s\n", strings.ReplaceAll(what, "\n", " "))
	}
}

// margin is how many more goroutines or descriptors than before may remain: for health
// checks in flight and kept connections.
const margin = 10

// checkLeaks waits until nothing of the load is left in the proxy, and sets and prints the
// result.
func (p *report) checkLeaks(ctx context.Context, proxy *testbed.Proxy, idle testbed.Metrics) error {
	p.OK = true
	for _, r := range p.Rows {
		p.OK = p.OK && r.ViolationCount == 0
	}
	var now testbed.Metrics
	err := waitUntil(ctx, waitTimeout, "goroutines and descriptors of the proxy to return to their number before the load",
		func() (back bool, err error) {
			if now, err = proxy.ReadMetrics(ctx); err != nil {
				return false, err
			}
			for _, name := range []string{"go_goroutines", "process_open_fds"} {
				if now.Sum(name) > idle.Sum(name)+margin {
					return false, nil
				}
			}
			return true, testbed.Sleep(ctx, 0)
		})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	p.Goroutines = [2]float64{idle.Sum("go_goroutines"), now.Sum("go_goroutines")}
	p.Descriptors = [2]float64{idle.Sum("process_open_fds"), now.Sum("process_open_fds")}
	p.InFlight = now.Sum("warmroute_backend_in_flight") + now.Sum("warmroute_queue_requests")
	if err != nil {
		p.Leak = err.Error()
	}
	p.OK = p.OK && err == nil && p.InFlight == 0
	if !p.quiet {
		fmt.Fprintf(p.out, "\nafter the load: %.0f goroutines (%.0f before), %.0f descriptors (%.0f before), %.0f in flight\n",
			p.Goroutines[1], p.Goroutines[0], p.Descriptors[1], p.Descriptors[0], p.InFlight)
		if p.Leak != "" {
			fmt.Fprintln(p.out, "  !", p.Leak)
		}
	}
	return nil
}

// printSummary prints the summary, or everything as JSON.
func (p *report) printSummary(asJSON bool) error {
	if asJSON {
		return json.NewEncoder(p.out).Encode(p)
	}
	if p.OK {
		_, err := fmt.Fprintln(p.out, "no request was lost that the failure table does not allow")
		return err
	}
	_, err := fmt.Fprintln(p.out, "FAILED")
	return err
}
