package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/cli"
	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

// benchTarget is an endpoint under measurement, with its results so far.
type benchTarget struct {
	name  string // its letter in the table
	url   string // without /v1
	model string

	key       string // empty: none
	keySource string // the flag that gave the key, with its value

	stats benchStats
}

// benchRun is a running benchmark.
type benchRun struct {
	o         *benchOptions
	targets   []*benchTarget
	tls       *tls.Config // nil: the system's authorities
	nonce     string      // differs between runs, so that no run is served from the caches that another filled
	bar       *progressBar
	slotsDone int          // a slot is one URL's part of a round
	requests  atomic.Int64 // completed in the current slot
}

// runBench sends the chats to all targets and prints the results.
func runBench(ctx context.Context, o *benchOptions, targets []*benchTarget, t *tls.Config, stdout, stderr io.Writer) error {
	if err := resolveModels(ctx, targets, t); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted before the first measurement")
		}
		return err
	}
	r := &benchRun{o: o, targets: targets, tls: t, nonce: rand.Text()[:8], bar: newProgressBar(stderr, "bench")}
	start := time.Now()
	r.runRounds(ctx)
	r.bar.clear()
	took := time.Since(start)

	report := r.report(ctx.Err() != nil)
	if ctx.Err() != nil && !slices.ContainsFunc(report.Results, func(b benchResult) bool { return b.Requests+b.Lost > 0 }) {
		return fmt.Errorf("interrupted after %.0f s, before the first measurement", took.Seconds())
	}
	if o.json {
		if err := json.NewEncoder(stdout).Encode(report); err != nil {
			return err
		}
	} else if err := report.writeTable(stdout); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted after %.0f s: results are incomplete", took.Seconds())
	}
	for _, t := range report.Results {
		if t.Requests == 0 {
			return fmt.Errorf("all requests to %s (%s) failed", t.Name, t.URL)
		}
	}
	return nil
}

const (
	endpointCheckTimeout = 10 * time.Second
	maxModelListBytes    = 1 << 20
	maxListedModels      = 10 // in an error message
)

// resolveModels asks each endpoint for its models and sets those that no flag names.
// It returns an error if an endpoint cannot be measured, before minutes are spent on it.
func resolveModels(ctx context.Context, targets []*benchTarget, c *tls.Config) error {
	client := loadgen.NewTLSClient(c)
	defer client.CloseIdleConnections()
	for _, t := range targets {
		if err := t.resolveModel(ctx, client); err != nil {
			return err
		}
	}
	return nil
}

func (t *benchTarget) resolveModel(ctx context.Context, client *http.Client) error {
	ctx, cancel := context.WithTimeout(ctx, endpointCheckTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.url+"/v1/models", nil)
	if err != nil {
		return err
	}
	if t.key != "" {
		req.Header.Set("Authorization", "Bearer "+t.key)
	}
	resp, err := client.Do(req)
	if described := cli.DescribeTLSError(err, t.url, "--url"); described != nil {
		return described
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no response from %s within %v: check the address and firewalls", t.url, endpointCheckTimeout)
	case err != nil:
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err
		}
		advice := "check that the server runs at this address"
		if strings.HasPrefix(t.url, "http:") && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
			advice += ", or use --url https://… if it requires that" // vLLM closes the connection
		}
		return fmt.Errorf("connect to %s: %w: %s", t.url, err, advice)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxModelListBytes))
	if err != nil {
		return fmt.Errorf("GET %s/v1/models: %w", t.url, err)
	}
	switch code := resp.StatusCode; {
	case (code == http.StatusUnauthorized || code == http.StatusForbidden) && t.key == "":
		return fmt.Errorf("%s requires an API key: use --api-key-file or --api-key-env", t.url)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return fmt.Errorf("%s rejects the API key of %s with status %d", t.url, t.keySource, code)
	case (code == http.StatusNotFound || code == http.StatusMethodNotAllowed) && t.model != "":
		return nil // it has no list; whether it has the model will be seen
	case code == http.StatusNotFound:
		return fmt.Errorf("%s has no /v1/models: check that it is the base URL of an OpenAI server, or name the model with --model", t.url)
	case cli.IsHTTPSRequired(code, body):
		return fmt.Errorf("%s requires https: use --url https://…", t.url)
	case code != http.StatusOK:
		return fmt.Errorf("GET %s/v1/models: status %d", t.url, code)
	}
	return t.selectListedModel(body)
}

// selectListedModel sets the model to the only one in a list, or checks that the
// model is in it.
func (t *benchTarget) selectListedModel(modelList []byte) error {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(modelList, &list); err != nil {
		return fmt.Errorf("GET %s/v1/models: not a list of models: check that it is the base URL of an OpenAI server", t.url)
	}
	var names, quoted []string
	for _, m := range list.Data {
		names = append(names, m.ID)
		if len(quoted) < maxListedModels {
			quoted = append(quoted, fmt.Sprintf("%.100q", m.ID))
		} else if len(quoted) == maxListedModels {
			quoted = append(quoted, "...")
		}
	}
	switch {
	case len(names) == 0:
		return fmt.Errorf("%s lists no models: wait until a replica is ready", t.url)
	case t.model != "" && !slices.Contains(names, t.model):
		return fmt.Errorf("unknown model %q at %s; available: %s", t.model, t.url, strings.Join(quoted, ", "))
	case t.model == "" && len(names) > 1:
		return fmt.Errorf("%s has several models: name one of %s with --model", t.url, strings.Join(quoted, ", "))
	}
	t.model = cmp.Or(t.model, names[0])
	return nil
}

// runRounds measures all targets in each round.
func (r *benchRun) runRounds(ctx context.Context) {
	for round := range r.o.rounds {
		order := slices.Clone(r.targets)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, t := range order {
			if ctx.Err() != nil {
				return
			}
			r.bar.describe(fmt.Sprintf("%s, round %d of %d", t.name, round+1, r.o.rounds))
			r.measureTarget(ctx, t, round)
			r.slotsDone++
		}
	}
}

// measureTarget measures one target in one round.
func (r *benchRun) measureTarget(ctx context.Context, t *benchTarget, round int) {
	connections := loadgen.NewTLSClient(r.tls)
	defer connections.CloseIdleConnections()
	stop := make(chan struct{})
	start := time.Now()
	measured := start.Add(r.o.warmup)
	r.requests.Store(0)
	client := &loadgen.Client{
		URL: t.url, Model: t.model, APIKey: t.key, HTTP: connections, Speed: 1, Timeout: r.o.timeout,
		OpenAIOnly: r.o.plain, Stop: stop,
		OnResult: func(result replay.Result) {
			r.requests.Add(1)
			if !result.Sent.Before(measured) {
				t.stats.add(result)
			}
		},
	}
	chats := r.newChats(t, round)
	if r.o.conversations == 0 {
		defer time.AfterFunc(r.slotDuration(), func() { close(stop) }).Stop()
	}
	done := make(chan struct{})
	var showing sync.WaitGroup
	showing.Go(func() { r.showProgress(start, done) })
	client.RunChats(ctx, chats)
	close(done)
	showing.Wait()
	// The requests sent in the measured time count, and so does that time: the time
	// until the last response ends would count a long response twice.
	took := time.Since(measured)
	if r.o.conversations == 0 {
		took = min(took, r.slotDuration()-r.o.warmup)
	}
	t.stats.elapsed += max(took, 0)
}

// slotDuration is the time in which a slot starts requests.
func (r *benchRun) slotDuration() time.Duration {
	return r.o.warmup + r.o.duration/time.Duration(r.o.rounds)
}

// newChats returns the conversations of a round, which differ between targets only in
// the nonce.
func (r *benchRun) newChats(t *benchTarget, round int) *loadgen.Chats {
	sessions := r.o.conversations / r.o.rounds
	if round < r.o.conversations%r.o.rounds {
		sessions++
	}
	around := func(mean int) loadgen.Range { return loadgen.Range{Min: mean / 2, Max: mean + mean/2} }
	return &loadgen.Chats{
		Seed:          r.o.seed + uint64(round)<<32,
		Nonce:         fmt.Sprintf("%s%02d%s ", r.nonce, round, t.name),
		Sessions:      sessions,
		Concurrency:   r.o.concurrency,
		SystemPrompts: r.o.systemPrompts,
		SystemTokens:  r.o.systemTokens,
		Zipf:          0.8,
		Turns:         loadgen.Range{Min: r.o.turns, Max: r.o.turns},
		UserTokens:    around(r.o.userTokens),
		OutputTokens:  around(r.o.outputTokens),
		Think:         r.o.think,
	}
}

// showProgress updates the bar until done is closed.
func (r *benchRun) showProgress(start time.Time, done <-chan struct{}) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	slots := float64(len(r.targets) * r.o.rounds)
	for {
		share := time.Since(start).Seconds() / r.slotDuration().Seconds()
		if n := r.o.conversations; n > 0 {
			share = float64(r.requests.Load()) * float64(r.o.rounds) / float64(n*r.o.turns)
		}
		r.bar.set((float64(r.slotsDone) + min(share, 1)) / slots)
		select {
		case <-tick.C:
		case <-done:
			return
		}
	}
}

// benchStats are the results of one target. add is safe for concurrent use.
type benchStats struct {
	replay.Tally
	elapsed time.Duration // measured time

	mu    sync.Mutex
	codes map[string]string // cause of failure → the first error code that came with it
}

func (s *benchStats) add(r replay.Result) {
	s.Tally.Add(r)
	if r.Err == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.codes == nil {
		s.codes = map[string]string{}
	}
	if s.codes[r.Err] == "" {
		s.codes[r.Err] = errorCode(r.Detail)
	}
}

// errorCode returns the code or the type in an OpenAI error, or "". The error's
// message is not printed, since servers quote prompts and keys in it.
func errorCode(body string) string {
	isIdentifier := func(s string) bool {
		return s != "" && len(s) <= 40 && !strings.ContainsFunc(s, func(r rune) bool {
			return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || r == '_')
		})
	}
	for _, path := range []string{"error.code", "error.type", "code", "type"} { // the last two: vLLM before 0.11
		if code := gjson.Get(body, path).Str; isIdentifier(code) {
			return code
		}
	}
	return ""
}
