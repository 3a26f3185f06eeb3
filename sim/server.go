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
	"sync"
	"time"

	"warmroute/sim/engine"
)

// Config describes a simulated replica. A zero field takes its default.
type Config struct {
	Engine engine.Config

	Model       string   // name it serves; default "sim"
	Adapters    []string // LoRA adapters loaded at the start, listed as models with Model as their parent
	MaxModelLen int      // tokens of prompt and answer; default 131,072, at most the KV cache's size
	APIKey      string   // asked for on /v1 when set

	// NoTokenDetails leaves prompt_tokens_details out of usage, as vLLM does
	// without --enable-prompt-tokens-details.
	NoTokenDetails bool
}

func (c Config) withDefaults() Config {
	c.Engine = c.Engine.WithDefaults()
	c.Model = cmp.Or(c.Model, "sim")
	c.MaxModelLen = min(cmp.Or(c.MaxModelLen, 131_072), c.Engine.KVTokens-c.Engine.KVTokens%max(1, c.Engine.BlockSize))
	return c
}

// keepAlive is how long vLLM leaves an idle connection open.
const keepAlive = 5 * time.Second

// drainCheck is how often a replica that drains looks whether it is done.
const drainCheck = 10 * time.Millisecond

// Server is one simulated replica. Create it with NewServer, then Listen, then
// Run. Its methods are safe for concurrent use, except that Listen comes first.
type Server struct {
	cfg  Config
	http http.Server

	address   string // as bound, to be bound again after connections were refused
	listening listening

	faults faults

	// engineMu guards the engine and everything that must change with it.
	engineMu sync.Mutex
	engine   *engine.Engine
	live     []*sequence // submitted and not ended
	counters *counters
	began    time.Time // when this process, as clients see it, started
	epoch    int       // restarts so far

	ending sync.WaitGroup // calls of Shutdown, which Run waits for

	// busy wakes the engine's owner when a request arrives while it is idle.
	busy chan struct{}
	// thawed wakes it when a freeze may be over.
	thawed chan struct{}

	adapters adapters
}

// NewServer returns a replica that neither listens nor runs yet.
func NewServer(cfg Config) *Server {
	cfg = cfg.withDefaults()
	s := &Server{
		cfg:      cfg,
		engine:   engine.New(cfg.Engine),
		counters: newCounters(),
		began:    time.Now(),
		busy:     make(chan struct{}, 1),
		thawed:   make(chan struct{}, 1),
	}
	for _, name := range cfg.Adapters {
		s.adapters.list = append(s.adapters.list, adapter{name, "/models/" + name})
	}
	s.http = http.Server{
		Handler:     s.routes(),
		IdleTimeout: keepAlive,
		ConnState:   s.connState,
		ErrorLog:    log.New(io.Discard, "", 0), // a client that misbehaves is the simulation's point
	}
	return s
}

// connState closes a connection whose answer has gone out, where a fault wants it.
func (s *Server) connState(c net.Conn, state http.ConnState) {
	if state == http.StateIdle && s.faults.has(CloseIdle) {
		c.Close()
	}
}

// Listen binds address, which may end in :0, so that URL is known and clients
// can connect. They are served once Run is called.
func (s *Server) Listen(address string) error {
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

// Run drives the engine and serves until ctx is done, when it cuts every
// connection, or Shutdown was called. It waits for what it started, and returns nil.
func (s *Server) Run(ctx context.Context) error {
	var owners sync.WaitGroup
	defer owners.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.http.BaseContext = func(net.Listener) context.Context { return ctx }
	owners.Go(func() { s.drive(ctx) })
	owners.Go(func() {
		<-ctx.Done()
		s.listening.close()
		s.http.Close()
	})

	for {
		l := s.listening.wait(ctx)
		if l == nil {
			return nil
		}
		err := s.http.Serve(l)
		if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
			s.ending.Wait()
			return nil
		}
		if !errors.Is(err, net.ErrClosed) { // closed: connections are to be refused for a while
			return fmt.Errorf("simulated replica %s: %w", s.address, err)
		}
	}
}

// Shutdown ends the replica as SIGTERM ends vLLM: no new connections, every
// request is aborted and told so, and Run returns. It waits for the last bytes
// to be written until ctx is done.
func (s *Server) Shutdown(ctx context.Context) error {
	s.ending.Add(1)
	defer s.ending.Done()
	s.AbortAll()
	err := s.http.Shutdown(ctx)
	s.listening.close()
	return err
}

// Drain lets requests finish for so long, while new ones are refused, as vLLM does
// after SIGTERM with --shutdown-timeout.
func (s *Server) Drain(limit time.Duration) {
	// The one fault cannot be wrong.
	_ = s.SetFault(Fault{Kind: Drain})
	for end := time.Now().Add(limit); time.Now().Before(end) && s.working(); time.Sleep(drainCheck) {
	}
}

// working reports whether any request has not had the last of its answer. The
// engine's own counters are ahead of that by a step.
func (s *Server) working() bool {
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

// ResetPrefixCache forgets all cached blocks unless a request is running, and
// reports whether it did.
func (s *Server) ResetPrefixCache() bool {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.engine.ResetPrefixCache()
}

// Restart makes the replica look as if its process had been killed and started
// again: streams are cut, the cache is empty, counters and the start time begin anew.
func (s *Server) Restart() {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, q := range s.live {
		q.end(killed)
	}
	s.live = nil
	s.engine = engine.New(s.cfg.Engine)
	s.counters = newCounters()
	s.began = time.Now()
	s.epoch++
}

// AbortAll ends every request the way vLLM's default reaction to SIGTERM does
// when the engine gets to it: whole, with finish_reason "abort".
func (s *Server) AbortAll() { s.endAll(aborted) }

// FailAll ends every request as vLLM does when its engine process dies, which
// is also what SIGTERM comes to on a busy replica: streams end with an error
// event and [DONE], other requests with a 500.
func (s *Server) FailAll() { s.endAll(failed) }

func (s *Server) endAll(why reason) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	for _, q := range s.live {
		s.engine.Abort(&q.Request)
		s.counters.success[why]++
		q.end(why)
	}
	s.live = nil
}

// Validate reports every setting that makes no sense.
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
		{"context length", c.MaxModelLen > 0},
		{"step time", e.StepTime > 0},
		{"decode time", e.DecodeTime > 0},
		{"context time", e.ContextTime > 0},
	} {
		if !positive.ok {
			errs = append(errs, fmt.Errorf("%s must be above 0", positive.name))
		}
	}
	if e.KVTokens > 0 && e.KVTokens < e.BlockSize {
		errs = append(errs, fmt.Errorf("%d KV tokens are less than a block of %d", e.KVTokens, e.BlockSize))
	}
	if !(e.QuadraticDepth >= 0 && e.QuadraticDepth <= 1) {
		errs = append(errs, errors.New("the quadratic term must be between 0 and 1"))
	}
	return errors.Join(errs...)
}
