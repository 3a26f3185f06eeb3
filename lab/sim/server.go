// Package sim is a simulated vLLM replica that needs no GPU: a Server drives an
// engine of package sim/engine by the wall clock behind vLLM's HTTP interface.
package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"warmroute/lab/sim/engine"
)

// Config describes a simulated replica. A zero field takes its default.
type Config struct {
	Engine engine.Config // of each rank
	Ranks  int           // data-parallel engines behind the one port; default 1
	Rank   RankConfig
	GPU    *GPU // that it shares with other servers; nil: its engines share none

	Model         string   // name it serves; default "sim"
	Adapters      []string // LoRA adapters loaded at the start
	BytesPerToken int      // of text, at most 4; default 4
	MediaTokens   int      // of an image, a sound or a video in a chat; 0: the model takes text only
	MaxModelLen   int      // tokens of prompt and output; default 131,072, at most the KV cache's size
	APIKey        string   // required on /v1 if set
	Without       []string // paths that it does not serve
	Script        Script   // replies to requests that offer tools

	// StoreResponses keeps complete responses of /v1/responses, as vLLM does with
	// VLLM_ENABLE_RESPONSES_API_STORE=1.
	StoreResponses bool

	// NoTokenDetails leaves prompt_tokens_details out of usage, as vLLM does
	// without --enable-prompt-tokens-details.
	NoTokenDetails bool

	KVEvents  KVEventsConfig // none by default
	Connector ConnectorConfig

	Version string // of vLLM, which it claims to be; default "0.32.0"
}

func (c Config) withDefaults() Config {
	c.Engine = c.Engine.WithDefaults()
	c.Engine.KVEvents = c.KVEvents.isEnabled()
	c.Ranks = cmp.Or(c.Ranks, 1)
	c.Model = cmp.Or(c.Model, "sim")
	c.Version = cmp.Or(c.Version, "0.32.0")
	c.BytesPerToken = cmp.Or(c.BytesPerToken, tokenIDBytes)
	c.MaxModelLen = cmp.Or(c.MaxModelLen, 131_072)
	if c.Engine.BlockSize > 0 {
		c.MaxModelLen = min(c.MaxModelLen, c.Engine.MaxRequestTokens())
	}
	return c
}

const keepAliveTimeout = 5 * time.Second // vLLM's

// Server is one simulated replica. Create it with NewServer, then Bind, then
// Run. Its methods are safe for concurrent use, except that Bind comes first.
type Server struct {
	cfg  Config
	http http.Server

	address   string // bound, also again after the fault Refuse
	listening listening

	faults faults

	// engineMu guards the engines and everything that must change with them.
	engineMu  sync.Mutex
	ranks     []*rank
	serving   int // of ranks, the first ones; the others are spare
	balancer  *engine.Balancer
	speed     float64   // of the engines, each on a GPU of its own
	startedAt time.Time // of the simulated process
	epoch     int       // restarts so far
	hashSeed  uint64    // of the hashes of blocks, as they differ between vLLM processes
	pause     pauseState
	engineID  string // in kv_transfer_params
	// prefillRequests are those that run or whose blocks are pinned, and some older ones, by transferID.
	prefillRequests map[string]*sequence

	connector *connector

	shutdowns sync.WaitGroup // Run waits for calls of AbortAndShutdown

	adapters adapters
	stored   responseStore
}

// NewServer returns a replica that neither listens nor runs yet.
func NewServer(cfg Config) *Server {
	cfg = cfg.withDefaults()
	s := &Server{
		cfg:       cfg,
		startedAt: time.Now(),
		connector: newConnector(),
	}
	s.serving = max(1, cfg.Ranks)
	for i := range s.serving + max(0, cfg.Rank.Spare) {
		k := &rank{work: make(chan struct{}, 1), thawed: make(chan struct{}, 1)}
		if cfg.Engine.KVEvents {
			k.publisher = newKVEventPublisher(cfg.Rank.First+i, cfg.KVEvents.Topic, &s.faults)
		}
		s.ranks = append(s.ranks, k)
	}
	s.startEngines()
	for i, name := range cfg.Adapters {
		s.adapters.list = append(s.adapters.list, adapter{i + 1, name, "/models/" + name})
	}
	s.adapters.lastID = len(cfg.Adapters)
	s.http = http.Server{
		Handler:     s.routes(),
		IdleTimeout: keepAliveTimeout,
		ConnState:   s.closeIdleOnFault,
		ConnContext: withKeptConn,
		ErrorLog:    log.New(io.Discard, "", 0), // do not log clients that disconnect
	}
	return s
}

// startEngines gives each rank a new engine, and blocks other hashes. It requires engineMu, or
// that nothing runs yet.
func (s *Server) startEngines() {
	s.hashSeed, s.speed = rand.Uint64(), s.cfg.Engine.Speed
	s.engineID, s.prefillRequests = randomID(), make(map[string]*sequence)
	for _, k := range s.ranks {
		cfg := s.cfg.Engine
		cfg.Seed = rand.Uint64()
		k.engine = engine.New(cfg)
		k.live, k.counters = nil, newCounters()
	}
	s.balanceServing()
}

// closeIdleOnFault closes idle connections while the fault CloseIdle is active.
func (s *Server) closeIdleOnFault(c net.Conn, state http.ConnState) {
	if state == http.StateIdle && s.faults.isActive(CloseIdle) {
		c.Close()
	}
}

// Bind binds address, which may end in :0, and the sockets for KV events, so that URL is
// known and clients can connect. They are served once Run is called.
func (s *Server) Bind(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("simulated replica: %w", err)
	}
	s.address = l.Addr().String()
	if err := s.bindPublishers(); err != nil {
		l.Close()
		return err
	}
	s.listening.set(l)
	return nil
}

// URL is the base URL, without a path.
func (s *Server) URL() string { return "http://" + s.address }

// Run runs the engines and serves until ctx is done, when it closes all connections,
// or AbortAndShutdown was called. It waits for all it started.
func (s *Server) Run(ctx context.Context) error {
	var owners sync.WaitGroup
	defer owners.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.http.BaseContext = func(net.Listener) context.Context { return context.WithValue(ctx, processContextKey{}, ctx) }
	for _, k := range s.ranks {
		owners.Go(func() { s.runEngine(ctx, k) })
		if k.publisher != nil {
			owners.Go(func() { k.publisher.serve(ctx) })
		}
	}
	owners.Go(func() {
		<-ctx.Done()
		s.listening.close()
		s.http.Close()
	})

	for {
		l := s.listening.await(ctx)
		if l == nil {
			return nil
		}
		err := s.http.Serve(l)
		if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
			s.shutdowns.Wait()
			return nil
		}
		if !errors.Is(err, net.ErrClosed) { // closed: connections are to be refused for a while
			return fmt.Errorf("simulated replica %s: %w", s.address, err)
		}
	}
}

// AbortAndShutdown ends the replica as SIGTERM ends vLLM: it accepts no new connections,
// aborts all requests and makes Run return. It waits for the last writes until ctx
// is done.
func (s *Server) AbortAndShutdown(ctx context.Context) error {
	s.shutdowns.Add(1)
	defer s.shutdowns.Done()
	s.AbortAll()
	err := s.http.Shutdown(ctx)
	s.listening.close()
	return err
}

// Drain refuses new requests and waits up to timeout for the others, as vLLM does
// after SIGTERM with --shutdown-timeout.
func (s *Server) Drain(timeout time.Duration) {
	_ = s.SetFault(Fault{Kind: Drain})
	for end := time.Now().Add(timeout); time.Now().Before(end) && s.hasLiveRequests(); time.Sleep(10 * time.Millisecond) {
	}
}

// hasLiveRequests reports whether any request has not ended. The engine's counters are a
// step ahead of that.
func (s *Server) hasLiveRequests() bool {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return slices.ContainsFunc(s.ranks, func(k *rank) bool { return len(k.live) > 0 })
}

// Stats returns the engines' counters and gauges, added up.
func (s *Server) Stats() engine.Stats {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.expireLeases(time.Since(s.startedAt))
	var st engine.Stats
	for _, k := range s.ranks {
		st.Add(k.engine.Stats())
	}
	return st
}

// ResetPrefixCache clears the caches of the engines on which no request is running, after it has preempted
// those that are, if preempt is set. It reports whether it cleared that of the first one, as vLLM does.
func (s *Server) ResetPrefixCache(preempt bool) (cleared bool) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.expireLeases(time.Since(s.startedAt))
	for i, k := range s.ranks {
		if preempt {
			k.engine.DiscardCache(time.Since(s.startedAt))
		}
		ok := k.engine.ResetPrefixCache()
		cleared = cleared || i == 0 && ok
	}
	return cleared
}

// Restart makes the replica appear killed and restarted: connections are reset, the
// cache is empty, counters and start time are new.
func (s *Server) Restart() {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, k := range s.ranks {
		for _, q := range k.live {
			q.publishEnd(processKilled)
		}
		if k.publisher != nil {
			k.publisher.restart()
		}
	}
	s.startEngines()
	s.pause = pauseState{}
	s.startedAt = time.Now()
	s.stored.clear()
	s.epoch++
}

// AbortAll ends every request as vLLM does on SIGTERM, if the engine gets to it:
// complete, with finish_reason "abort".
func (s *Server) AbortAll() { s.endAll(aborted) }

// FailAll ends every request as vLLM does when its engine process dies, also on
// SIGTERM of a busy replica: streams end with an error event and [DONE], other
// requests with a 500.
func (s *Server) FailAll() { s.endAll(engineFailed) }

func (s *Server) endAll(reason endReason) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, k := range s.ranks {
		for _, q := range k.live {
			k.engine.Abort(&q.Request)
			k.counters.success[reason]++
			q.publishEnd(reason)
		}
		k.live = nil
	}
}

// Validate returns an error that names every invalid setting.
func (c Config) Validate() error {
	c = c.withDefaults()
	e := c.Engine
	var errs []error
	for _, positive := range []struct {
		name string
		ok   bool
	}{
		{"number of ranks", c.Ranks > 0},
		{"label of the first rank, plus 1,", c.Rank.First >= 0},
		{"block size", e.BlockSize > 0},
		{"KV tokens", e.KVTokens > 0},
		{"step's token budget", e.StepTokens > 0},
		{"sequence limit", e.MaxSeqs > 0},
		{"prefill rate", e.PrefillRate > 0},
		{"host load rate", e.HostLoadRate > 0},
		{"KV transfer time", e.TransferTime > 0},
		{"KV bytes per token", e.TransferTokenBytes > 0},
		{"KV transfer bandwidth", e.TransferBandwidth > 0},
		{"KV lease", e.Lease > 0},
		{"speed", e.Speed > 0},
		{"bytes per token", c.BytesPerToken > 0},
		{"context length", c.MaxModelLen > 0},
		{"step time", e.StepTime > 0},
		{"decode time", e.DecodeTime > 0},
		{"context time", e.ContextTime > 0},
	} {
		if !positive.ok {
			errs = append(errs, fmt.Errorf("%s must be above 0", positive.name))
		}
	}
	if c.BytesPerToken > tokenIDBytes {
		errs = append(errs, fmt.Errorf("bytes per token %d exceed %d", c.BytesPerToken, tokenIDBytes))
	}
	if e.KVTokens > 0 && e.KVTokens < e.BlockSize {
		errs = append(errs, fmt.Errorf("KV tokens %d are fewer than a block of %d", e.KVTokens, e.BlockSize))
	}
	if err := c.KVEvents.validate(c.Rank.First + c.Ranks + c.Rank.Spare); err != nil {
		errs = append(errs, err)
	}
	if c.Connector.Enabled && e.HostKVTokens > 0 {
		errs = append(errs, errors.New("a replica with a KV connector cannot have a cache in host memory: choose one of them"))
	}
	if e.HostKVTokens < 0 {
		errs = append(errs, errors.New("host KV tokens must not be negative"))
	}
	if c.Connector.Enabled && e.Groups.IsHybrid() {
		errs = append(errs, errors.New("a replica with a KV connector cannot have several KV cache groups here: choose one of them"))
	}
	errs = append(errs, e.ValidateShares(), e.ValidateGroups())
	for _, path := range c.Without {
		if !strings.HasPrefix(path, "/") {
			errs = append(errs, fmt.Errorf("path %q that is not served must begin with a slash", path))
		}
	}
	return errors.Join(errs...)
}

// listening holds the listener, which is closed while connections are refused.
type listening struct {
	mu      sync.Mutex
	current net.Listener
	refuse  bool
	changed chan struct{} // closed and replaced when current is set
	closed  bool
}

func (l *listening) set(n net.Listener) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current, l.refuse = n, false
	l.notify()
}

// notify wakes calls of wait. It requires mu.
func (l *listening) notify() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// await waits until there is a listener and returns it, or nil when ctx is done or
// close was called.
func (l *listening) await(ctx context.Context) net.Listener {
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return nil
		}
		if l.current != nil {
			defer l.mu.Unlock()
			return l.current
		}
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// suspend closes the listener until reopenIfSuspended, so that the kernel refuses connections.
func (l *listening) suspend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse = true
	if l.current != nil {
		l.current.Close()
		l.current = nil
	}
}

// reopenIfSuspended binds address again if suspend was called.
func (l *listening) reopenIfSuspended(address string) error {
	l.mu.Lock()
	stopped := l.refuse && !l.closed
	l.mu.Unlock()
	if !stopped {
		return nil
	}
	n, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	l.set(n)
	return nil
}

func (l *listening) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.notify()
	if l.current != nil {
		l.current.Close()
	}
}
