package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/backends"
	"warmroute/cli"
	"warmroute/config"
	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/server"
)

const (
	// demoKVTokens is the size of a replica's KV cache: small, so that 20 seconds of
	// a few users' chats show what hours of many users' chats do to a large one.
	demoKVTokens = 32_000
	// demoLongKVTokens is that of --disaggregation: what is compared there is prefill and decode, not the hits of the caches.
	demoLongKVTokens = 400_000

	maxDemoBackends    = 64
	demoRequestTimeout = time.Minute // requests take about a second
	demoReadyTimeout   = 10 * time.Second
	demoSampleInterval = 50 * time.Millisecond
	demoUpdateInterval = 500 * time.Millisecond
)

// demoOptions are the flags of demo.
type demoOptions struct {
	backends       int
	duration       time.Duration // 0: until interrupted
	listen         string
	admin          string
	page           string
	disaggregation bool
	json           bool
}

// demoSetup is what the two fleets are compared for.
type demoSetup struct {
	title    string
	chats    *loadgen.Chats
	kvTokens int // of each replica
	fleets   [2]demoFleetSetup
}

type demoFleetSetup struct {
	label    string
	policy   string
	prefills int // replicas for prefill, the others are for decode; 0: each does both
}

// setup returns what the flags ask for.
func (o *demoOptions) setup() demoSetup {
	if !o.disaggregation {
		return demoSetup{
			title: "Round robin and prefix routing, on the same chats", chats: demoChats(o.backends), kvTokens: demoKVTokens,
			fleets: [2]demoFleetSetup{{label: "round-robin", policy: "round-robin"}, {label: "prefix", policy: "prefix"}},
		}
	}
	prefills := o.backends / 2
	return demoSetup{
		title: "The same replicas for whole requests, and for prefill or decode", chats: demoLongChats(o.backends), kvTokens: demoLongKVTokens,
		fleets: [2]demoFleetSetup{
			{label: fmt.Sprintf("%d both", o.backends), policy: "prefix"},
			{label: fmt.Sprintf("%d P + %d D", prefills, o.backends-prefills), policy: "prefix", prefills: prefills},
		},
	}
}

// newDemoCommand returns the demo command.
func newDemoCommand(configs config.Loader) *cobra.Command {
	var o demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Compare round robin and prefix routing live on simulated replicas",
		Long: `Send the same live chats to two identical fleets of simulated replicas, over real
sockets: one behind a proxy with the policy round-robin, one behind a proxy with
the policy prefix. It runs until Ctrl-C, or for --for, and needs no GPU and no
network.

With --disaggregation both have the policy prefix, and the replicas of the second fleet are
for prefill or for decode, half of them each.`,
		Example: `  warmroute demo
  warmroute demo --for 30s --backends 8
  warmroute demo --for 20s --json | jq '.results[] | {policy, hit_ratio, ttft_mean_s}'`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			return o.validate()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemo(cmd.Context(), o, configs, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVar(&o.backends, "backends", 4, "number `N` of simulated replicas in each fleet")
	flags.DurationVar(&o.duration, "for", 0, "stop after `DURATION`; 0 runs until Ctrl-C")
	flags.StringVar(&o.listen, "listen", "127.0.0.1:0",
		"`ADDRESS` of the proxy with the policy prefix, which accepts other requests too; port 0 selects a free one")
	flags.StringVar(&o.admin, "admin", "127.0.0.1:0", "`ADDRESS` of its admin listener, with metrics and the live page")
	flags.StringVar(&o.page, "page", "127.0.0.1:0", "`ADDRESS` of a page that shows both fleets")
	flags.BoolVar(&o.disaggregation, "disaggregation", false, "compare replicas for prefill and decode with those that do both")
	flags.BoolVar(&o.json, "json", false, "print only the results, as JSON")
	return cmd
}

func (o *demoOptions) validate() error {
	switch {
	case o.backends < 1 || o.backends > maxDemoBackends:
		return fmt.Errorf("--backends %d is not between 1 and %d", o.backends, maxDemoBackends)
	case o.disaggregation && o.backends < 2:
		return fmt.Errorf("--disaggregation needs at least 2 --backends, not %d", o.backends)
	case o.duration < 0:
		return fmt.Errorf("--for %v is negative", o.duration)
	}
	return nil
}

// demoChats returns the demo's traffic: long chats over many system prompts, of six
// users per replica, each pausing about a second between messages. Their
// conversations fit into the caches of all replicas together, but a quarter of them
// does not quite fit into one.
func demoChats(backends int) *loadgen.Chats {
	return &loadgen.Chats{
		Seed:          1,
		Concurrency:   6 * backends,
		SystemPrompts: 10 * backends,
		SystemTokens:  1200,
		Zipf:          0.8,
		Turns:         loadgen.Range{Min: 6, Max: 14},
		UserTokens:    loadgen.Range{Min: 200, Max: 600},
		OutputTokens:  loadgen.Range{Min: 30, Max: 90},
		Think:         time.Second,
	}
}

// demoLongChats is the traffic of --disaggregation: chats about long texts, since a short prompt is not worth the KV transfer.
func demoLongChats(backends int) *loadgen.Chats {
	c := demoChats(backends)
	c.Turns = loadgen.Range{Min: 1, Max: 3}
	c.UserTokens = loadgen.Range{Min: 2000, Max: 12_000}
	c.OutputTokens = loadgen.Range{Min: 100, Max: 300}
	c.Think = 2 * time.Second
	return c
}

// describeDemoTraffic returns what the chats are, in one sentence.
func describeDemoTraffic(c *loadgen.Chats) string {
	return fmt.Sprintf("%d users chat at the same time with each fleet: a chat begins with one of %d system prompts of about %d tokens, "+
		"some of them much more popular, "+
		"and has %d to %d messages of %d to %d tokens, with outputs of %d to %d; each user pauses about %.0f s before a message.",
		c.Concurrency, c.SystemPrompts, c.SystemTokens, c.Turns.Min, c.Turns.Max, c.UserTokens.Min, c.UserTokens.Max, c.OutputTokens.Min,
		c.OutputTokens.Max, c.Think.Seconds())
}

// runDemo runs the demo until ctx is done or its time is over, and prints the results.
func runDemo(ctx context.Context, o demoOptions, configs config.Loader, out io.Writer) error {
	setup := o.setup()
	// The servers outlive the clients, so that no request is aborted.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	load, stopLoad := context.WithCancelCause(ctx)
	defer stopLoad(nil)

	var servers sync.WaitGroup
	defer servers.Wait()
	defer stop()
	// startServer runs a server until the end; if the server fails, the demo ends.
	startServer := func(serve func(context.Context) error) {
		servers.Go(func() {
			if err := serve(serving); err != nil {
				stopLoad(err)
			}
		})
	}
	page, err := newDemoPage(o.page, setup.title)
	if err != nil {
		return fmt.Errorf("--page: %w", err)
	}
	startServer(page.run)
	baseline, err := setup.startReplicasAndProxy(configs, 0, o.backends, "127.0.0.1:0", "127.0.0.1:0", startServer)
	if err != nil {
		return err
	}
	second, err := setup.startReplicasAndProxy(configs, 1, o.backends, o.listen, o.admin, startServer)
	if err != nil {
		return err
	}
	if !o.json {
		setup.writeTraffic(out, o.backends)
	}
	fleets := []*demoFleet{baseline, second}
	for _, f := range fleets {
		if err := f.waitReady(ctx); err != nil {
			return err
		}
	}

	screen := newDemoScreen(out)
	if !o.json {
		writeDemoAddresses(out, page, second)
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		load, cancel = context.WithTimeout(load, o.duration)
		defer cancel()
	}
	elapsed := setup.runLoad(load, o, fleets, screen, page)
	if cause := context.Cause(load); ctx.Err() == nil && !errors.Is(cause, context.DeadlineExceeded) {
		return cause // a server failed
	}
	results := summarizeFleets(fleets, elapsed)
	if o.json {
		return json.NewEncoder(out).Encode(replay.Report{Results: results})
	}
	screen.showFinal(elapsed, results)
	if o.disaggregation {
		fmt.Fprintf(out, "\n%s\n", describeSplits(results[0], results[1]))
	} else {
		fmt.Fprintf(out, "\n%s\n", savedPrefill(baseline.prefill(), second.prefill()))
	}
	return nil
}

// describeSplits says how many requests were split, and how far tokens are apart at most with and without.
func describeSplits(both, roles replay.Summary) string {
	return fmt.Sprintf("Split: %.0f of %d requests. 99 %% of the gaps between tokens are below %.0f ms, and below %.0f ms on replicas that "+
		"do both.",
		roles.SplitShare*float64(roles.Requests), roles.Requests, roles.ITLP99*1000, both.ITLP99*1000)
}

// runLoad sends the chats to all fleets until ctx is done, and returns the time
// that this took.
func (s *demoSetup) runLoad(ctx context.Context, o demoOptions, fleets []*demoFleet, screen *demoScreen,
	page *demoPage) (elapsed time.Duration) {
	state := demoState{Title: s.title, Traffic: describeDemoTraffic(s.chats)}
	for _, f := range fleets {
		state.LivePages = append(state.LivePages, f.adminURL+"/")
	}
	start := time.Now()
	var clients sync.WaitGroup
	for _, f := range fleets {
		clients.Go(func() { f.runChats(ctx, s.chats) })
	}
	sample, refresh := time.NewTicker(demoSampleInterval), time.NewTicker(demoUpdateInterval)
	defer sample.Stop()
	defer refresh.Stop()
	if screen.terminal && !o.json {
		screen.update(0, summarizeFleets(fleets, 0))
	}
	for ctx.Err() == nil {
		select {
		case <-sample.C:
			for _, f := range fleets {
				f.sampleInFlight()
			}
		case <-refresh.C:
			state.Elapsed, state.Results = time.Since(start).Seconds(), summarizeFleets(fleets, time.Since(start))
			page.update(state)
			if !o.json && screen.isUpdateDue(time.Since(start)) {
				screen.update(time.Since(start), state.Results)
			}
		case <-ctx.Done():
		}
	}
	elapsed = time.Since(start)
	clients.Wait()
	return elapsed
}

// summarizeFleets returns a summary of the results so far for each fleet.
func summarizeFleets(fleets []*demoFleet, elapsed time.Duration) []replay.Summary {
	var all []replay.Summary
	for _, f := range fleets {
		all = append(all, f.summary(elapsed))
	}
	return all
}

func (s *demoSetup) writeTraffic(out io.Writer, backends int) {
	difference := "one behind a proxy with the policy round-robin, one behind a proxy with the policy prefix."
	if p := s.fleets[1].prefills; p > 0 {
		difference = fmt.Sprintf("each of the first does whole requests, of the second %d are for prefill (P) and %d for decode (D).", p,
			backends-p)
	}
	fmt.Fprintf(out, "%s\n\n%s\n\n",
		wrapText(fmt.Sprintf("Starting two fleets of %d simulated replicas: %s Both get the same chats.", backends, difference), 80),
		wrapText(describeDemoTraffic(s.chats), 80))
}

func writeDemoAddresses(out io.Writer, page *demoPage, f *demoFleet) {
	fmt.Fprintf(out, `You can send requests to the second proxy too, with any API key:

  curl %s/v1/chat/completions \
    -H 'Content-Type: application/json' \
    -d '{"model":"sim","messages":[{"role":"user","content":"Hello"}]}'

Both fleets: %s/
`, f.url, page.url())
	if f.adminURL != "" {
		fmt.Fprintf(out, "Live page: %s/ (%s)\nMetrics: %[1]s/metrics\n", f.adminURL, f.label)
	}
	fmt.Fprintln(out)
}

// wrapText breaks a text into lines of at most width characters.
func wrapText(text string, width int) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case column+1+len(word) > width:
			b.WriteByte('\n')
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// demoFleet is a proxy with simulated replicas, and the results of the chats sent to it.
type demoFleet struct {
	label    string
	url      string // of the proxy, without /v1
	adminURL string // of its admin listener; empty: none
	tally    replay.Tally

	replicas []*sim.Server
	inFlight []float64 // sum of samples, by replica
}

// startReplicasAndProxy starts simulated replicas of one of the fleets and a proxy in front of them, each with
// startServer, which does not block. It does not wait until they are
// ready. An empty adminAddr means no admin listener.
func (s *demoSetup) startReplicasAndProxy(configs config.Loader, fleet, replicas int, proxyAddr, adminAddr string,
	startServer func(serve func(context.Context) error)) (*demoFleet, error) {
	its := s.fleets[fleet]
	f := &demoFleet{label: its.label, inFlight: make([]float64, replicas)}
	var urls []string
	for range replicas {
		replica := sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: s.kvTokens},
			Connector: sim.ConnectorConfig{Enabled: its.prefills > 0}})
		if err := replica.Bind("127.0.0.1:0"); err != nil {
			return nil, err
		}
		startServer(replica.Run)
		f.replicas = append(f.replicas, replica)
		urls = append(urls, replica.URL())
	}
	c, err := demoConfig(configs, its.policy, proxyAddr, adminAddr, urls)
	if err != nil {
		return nil, err
	}
	for i := range c.Backends {
		switch {
		case i < its.prefills:
			c.Backends[i].Role = backends.RolePrefill.String()
		case its.prefills > 0:
			c.Backends[i].Role = backends.RoleDecode.String()
		}
	}
	log, _ := server.NewLogger(c.Log, os.Stderr)
	proxy, err := server.New(server.Options{Config: c, Policies: configs.Policies, Log: log, Version: cli.Version()})
	if err != nil {
		return nil, err
	}
	startServer(proxy.Run)
	f.url = localBaseURL(proxy.Addr())
	if proxy.AdminAddr() != nil {
		f.adminURL = localBaseURL(proxy.AdminAddr())
	}
	return f, nil
}

// demoConfig returns the default configuration with the settings of the demo.
func demoConfig(configs config.Loader, policy, proxyAddr, adminAddr string, urls []string) (*config.Config, error) {
	flags := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	configs.AddFlags(flags)
	for name, value := range map[string]string{
		"policy":    policy,
		"listen":    proxyAddr,
		"admin":     adminAddr,
		"log-level": "error", // replicas start and stop with the demo
	} {
		if err := flags.Set(name, value); err != nil {
			return nil, err
		}
	}
	return configs.LoadWithoutFile(flags, urls)
}

// localBaseURL returns the URL at which this machine reaches a listener.
func localBaseURL(a net.Addr) string { return "http://" + config.LocalAddr(a.String()) }

// waitReady returns when the proxy has a ready replica.
func (f *demoFleet) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, demoReadyTimeout)
	defer cancel()
	for cli.CheckHealth(ctx, f.url+"/readyz") != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("proxy of fleet %s did not become ready: %w", f.label, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// runChats sends the chats to the proxy until ctx is done.
func (f *demoFleet) runChats(ctx context.Context, chats *loadgen.Chats) {
	connections := loadgen.NewHTTPClient()
	defer connections.CloseIdleConnections()
	client := &loadgen.Client{
		URL: f.url, Model: "sim", HTTP: connections,
		Speed: 1, Timeout: demoRequestTimeout, OnResult: f.tally.Add,
	}
	client.RunChats(ctx, chats)
}

// sampleInFlight adds the current number of requests on each replica. It must be called at
// even intervals.
func (f *demoFleet) sampleInFlight() {
	for i, r := range f.replicas {
		stats := r.Stats()
		f.inFlight[i] += float64(stats.Running + stats.Waiting)
	}
}

// prefill is what the replicas of a fleet have computed of their prompts, in tokens.
type prefill struct{ prompts, computed float64 }

func (p prefill) share() float64 { return p.computed / p.prompts }

// prefill returns the sum over the replicas.
func (f *demoFleet) prefill() (sum prefill) {
	for _, r := range f.replicas {
		stats := r.Stats()
		sum.prompts += float64(stats.PrefixQueries)
		sum.computed += float64(stats.PrefixQueries - stats.PrefixHits)
	}
	return sum
}

// savedPrefill says how much less was computed for the prompts of ours than round robin would have computed for the same.
func savedPrefill(base, ours prefill) string {
	if base.computed == 0 || ours.prompts == 0 {
		return "Saved: no prompt was computed."
	}
	tokens := (base.share() - ours.share()) * ours.prompts
	return fmt.Sprintf("Saved against round robin: %.0f %% of the prefill, %.0f prompt tokens or %.1f s of a replica.",
		100*(1-ours.share()/base.share()), tokens, tokens/engine.DefaultPrefillRate)
}

// summary returns the results so far. It must not be called concurrently with sample.
func (f *demoFleet) summary(elapsed time.Duration) replay.Summary {
	work := make([]float64, len(f.replicas))
	for i, r := range f.replicas {
		stats := r.Stats()
		work[i] = float64(stats.PrefixQueries - stats.PrefixHits)
	}
	s := f.tally.Summary(f.label, elapsed)
	s.WorkMaxOverMean = replay.MaxOverMean(work)
	s.InFlightMaxOverMean = replay.MaxOverMean(f.inFlight)
	return s
}
