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

	"warmroute/scripts/testbed"
)

// row is what a scenario came to.
type row struct {
	Scenario   string             `json:"scenario"`
	Seconds    float64            `json:"seconds"`
	Sent       int                `json:"sent"`
	Answered   int                `json:"answered"`
	Failed     map[string]int     `json:"failed"`      // by cause
	Retried    int                `json:"retried"`     // attempts that failed and could be made elsewhere
	Recovered  map[string]float64 `json:"recovered_s"` // the longest, from a replica's first answer after its trouble to its first traffic
	Broken     int                `json:"violations"`
	Violations []string           `json:"first_violations,omitempty"`
	Measured   []string           `json:"measured,omitempty"`
}

// report is that of a whole run.
type report struct {
	Rows []row `json:"scenarios"`
	// After all of it, against before: what must be back.
	Goroutines  [2]float64 `json:"goroutines"`
	Descriptors [2]float64 `json:"descriptors"`
	InFlight    float64    `json:"in_flight"`
	Stays       string     `json:"stays,omitempty"` // what is not, for people
	OK          bool       `json:"ok"`

	out   io.Writer
	quiet bool // until the end
}

// runScenario plays one scenario under load.
func (r *rig) runScenario(ctx context.Context, s scenario, load *clients) (row, error) {
	before, err := r.proxy.Scrape(ctx)
	if err != nil {
		return row{}, err
	}
	begun, err := r.executions(ctx)
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
	// What never came to be is as bad as a lost request; the next scenario needs
	// a fleet that is whole again.
	r.verdict.require(err == nil, "%v", err)
	if err := errors.Join(r.restore(ctx), r.awaitIdle(ctx)); err != nil {
		return row{}, fmt.Errorf("%s: %w", s.name, err)
	}
	after, err := r.proxy.Scrape(ctx)
	if err != nil {
		return row{}, err
	}
	const retries, started = "warmroute_retries_total", "process_start_time_seconds"
	retried := after.Sum(retries)
	if after.Sum(started) == before.Sum(started) { // else another process counts from 0
		retried -= before.Sum(retries)
	}
	v := r.verdict
	if r.countExecutions {
		asked := after.Sum("warmroute_requests_total") - before.Sum("warmroute_requests_total")
		v.require(asked <= float64(v.sent), "%d requests were sent, and the proxy counted %v", v.sent, asked)
		now, err := r.executions(ctx)
		if err != nil {
			return row{}, err
		}
		v.require(now-begun <= float64(v.sent)+retried, "the replicas executed %v requests: more than the %d that were asked and the %v that were counted as retries",
			now-begun, v.sent, retried)
	}
	out := row{
		Scenario: s.name, Seconds: time.Since(began).Seconds(), Sent: v.sent, Answered: v.answered, Failed: v.failed,
		Retried:   int(retried),
		Recovered: map[string]float64{}, Broken: v.violationCount, Violations: v.violations, Measured: v.measurements,
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
		load.run(ctx, stop, r.verdict.addResponse)
	}()
	defer func() { close(stop); <-stopped }()
	if err := r.awaitAnswers(ctx, 2*load.number); err != nil { // the load has begun
		return err
	}
	if err := s.act(ctx, r); err != nil {
		return err
	}
	return r.awaitAnswers(ctx, 2*load.number) // the fleet has recovered
}

func (p *report) add(r row) {
	p.Rows = append(p.Rows, r)
	if p.quiet {
		return
	}
	if len(p.Rows) == 1 {
		fmt.Fprintf(p.out, "%-16s %7s %9s %7s %8s %8s  %s\n", "", "sent", "answered", "failed", "retried", "recovered", "")
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
	if r.Broken > 0 {
		verdict = fmt.Sprint(r.Broken, " VIOLATIONS")
	}
	fmt.Fprintf(p.out, "%-16s %7d %9d %7d %8d %8s  %s\n", r.Scenario, r.Sent, r.Answered, failed, r.Retried, recovery, verdict)
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

// margin is what may stay beside what was there before: a probe under way, a
// connection to a replica that is still kept.
const margin = 10

// end looks at the proxy once more, after the load: nothing may be left of it.
func (p *report) end(ctx context.Context, proxy *testbed.Proxy, idle testbed.Metrics) error {
	p.OK = true
	for _, r := range p.Rows {
		p.OK = p.OK && r.Broken == 0
	}
	var now testbed.Metrics
	err := waitUntil(ctx, waitTimeout, "goroutines and descriptors of the proxy are back to what they were", func() (back bool, err error) {
		if now, err = proxy.Scrape(ctx); err != nil {
			return false, err
		}
		for _, name := range []string{"go_goroutines", "process_open_fds"} {
			if now.Sum(name) > idle.Sum(name)+margin {
				return false, nil
			}
		}
		return true, sleep(ctx, 0)
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	p.Goroutines = [2]float64{idle.Sum("go_goroutines"), now.Sum("go_goroutines")}
	p.Descriptors = [2]float64{idle.Sum("process_open_fds"), now.Sum("process_open_fds")}
	p.InFlight = now.Sum("warmroute_backend_in_flight") + now.Sum("warmroute_queue_requests")
	if err != nil {
		p.Stays = err.Error()
	}
	p.OK = p.OK && err == nil && p.InFlight == 0
	if !p.quiet {
		fmt.Fprintf(p.out, "\nafter the load: %.0f goroutines (%.0f before), %.0f descriptors (%.0f before), %.0f in flight\n",
			p.Goroutines[1], p.Goroutines[0], p.Descriptors[1], p.Descriptors[0], p.InFlight)
		if p.Stays != "" {
			fmt.Fprintln(p.out, "  !", p.Stays)
		}
	}
	return nil
}

// finish prints the last word.
func (p *report) finish(asJSON bool) error {
	if asJSON {
		return json.NewEncoder(p.out).Encode(p)
	}
	if p.OK {
		_, err := fmt.Fprintln(p.out, "nothing was lost that the failure table does not allow")
		return err
	}
	_, err := fmt.Fprintln(p.out, "FAILED")
	return err
}
