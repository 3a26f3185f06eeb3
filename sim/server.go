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
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"warmroute/sim/engine"
)

// Config describes a simulated replica. A zero field takes its default.
type Config struct {
	Engine engine.Config

	Model         string   // name it serves; default "sim"
	Adapters      []string // LoRA adapters loaded at the start
	BytesPerToken int      // of text, at most 4; default 4
	MaxModelLen   int      // tokens of prompt and answer; default 131,072, at most the KV cache's size
	APIKey        string   // required on /v1 if set
	Without       []string // paths that it does not serve
	Script        Script   // replies to requests that offer tools

	// StoreResponses keeps complete responses of /v1/responses, as vLLM does with
	// VLLM_ENABLE_RESPONSES_API_STORE=1.
	StoreResponses bool

	// NoTokenDetails leaves prompt_tokens_details out of usage, as vLLM does
	// without --enable-prompt-tokens-details.
	NoTokenDetails bool
}

func (c Config) withDefaults() Config {
	c.Engine = c.Engine.WithDefaults()
	c.Model = cmp.Or(c.Model, "sim")
	c.BytesPerToken = cmp.Or(c.BytesPerToken, tokenIDBytes)
	c.MaxModelLen = min(cmp.Or(c.MaxModelLen, 131_072), c.Engine.KVTokens-c.Engine.KVTokens%max(1, c.Engine.BlockSize))
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

	// engineMu guards the engine and everything that must change with it.
	engineMu  sync.Mutex
	engine    *engine.Engine
	live      []*sequence // submitted and not ended
	counters  *counters
	startedAt time.Time // of the simulated process
	epoch     int       // restarts so far

	shutdowns sync.WaitGroup // Run waits for calls of AbortAndShutdown

	// submitted wakes runEngine when a request arrives while it is idle.
	submitted chan struct{}
	// thawed wakes it when a freeze may have ended.
	thawed chan struct{}

	adapters adapters
	stored   responseStore
}

// NewServer returns a replica that neither listens nor runs yet.
func NewServer(cfg Config) *Server {
	cfg = cfg.withDefaults()
	s := &Server{
		cfg:       cfg,
		engine:    engine.New(cfg.Engine),
		counters:  newCounters(),
		startedAt: time.Now(),
		submitted: make(chan struct{}, 1),
		thawed:    make(chan struct{}, 1),
	}
	for _, name := range cfg.Adapters {
		s.adapters.list = append(s.adapters.list, adapter{name, "/models/" + name})
	}
	s.http = http.Server{
		Handler:     s.routes(),
		IdleTimeout: keepAliveTimeout,
		ConnState:   s.closeIdleOnFault,
		ErrorLog:    log.New(io.Discard, "", 0), // do not log clients that disconnect
	}
	return s
}

// closeIdleOnFault closes idle connections while the fault CloseIdle is active.
func (s *Server) closeIdleOnFault(c net.Conn, state http.ConnState) {
	if state == http.StateIdle && s.faults.isActive(CloseIdle) {
		c.Close()
	}
}

// Bind binds address, which may end in :0, so that URL is known and clients can
// connect. They are served once Run is called.
func (s *Server) Bind(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("simulated replica: %w", err)
	}
	s.address = l.Addr().String()
	s.listening.set(l)
	return nil
}

// URL is the base URL, without a path.
func (s *Server) URL() string { return "http://" + s.address }

// Run runs the engine and serves until ctx is done, when it closes all connections,
// or AbortAndShutdown was called. It waits for all it started.
func (s *Server) Run(ctx context.Context) error {
	var owners sync.WaitGroup
	defer owners.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.http.BaseContext = func(net.Listener) context.Context { return ctx }
	owners.Go(func() { s.runEngine(ctx) })
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
	return len(s.live) > 0
}

// Stats returns the engine's counters and gauges.
func (s *Server) Stats() engine.Stats {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.engine.Stats()
}

// ResetPrefixCache clears the cache unless a request is running, and reports whether
// it did.
func (s *Server) ResetPrefixCache() (cleared bool) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.engine.ResetPrefixCache()
}

// Restart makes the replica appear killed and restarted: connections are reset, the
// cache is empty, counters and start time are new.
func (s *Server) Restart() {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, q := range s.live {
		q.publishEnd(processKilled)
	}
	s.live = nil
	s.engine = engine.New(s.cfg.Engine)
	s.counters = newCounters()
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
	for _, q := range s.live {
		s.engine.Abort(&q.Request)
		s.counters.success[reason]++
		q.publishEnd(reason)
	}
	s.live = nil
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
		{"block size", e.BlockSize > 0},
		{"KV tokens", e.KVTokens > 0},
		{"step's token budget", e.StepTokens > 0},
		{"sequence limit", e.MaxSeqs > 0},
		{"prefill rate", e.PrefillRate > 0},
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
	if err := e.ValidateQuadraticDepth(); err != nil {
		errs = append(errs, err)
	}
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
