package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
)

// guarded is simulated replicas behind a proxy with the default settings, and
// clients that go past it.
type guarded struct {
	t        *testing.T
	replicas []*sim.Server
	server   *Server
	url      string
	admin    string
	log      syncBuffer
	client   *http.Client
}

func startGuarded(t *testing.T, n int, c sim.Config, change func(*config.Config)) *guarded {
	t.Helper()
	g := &guarded{t: t}
	for range n {
		s, _ := g.startReplica(c)
		g.replicas = append(g.replicas, s)
	}
	s, _ := startServer(t, &g.log, change, g.replicaURLs()...)
	g.use(s)
	return g
}

// startReplica starts a replica, which g.replicas does not have yet, until stop is called or the test ends.
func (g *guarded) startReplica(c sim.Config) (s *sim.Server, stop func()) {
	g.t.Helper()
	s = sim.NewServer(c)
	if err := s.Bind("127.0.0.1:0"); err != nil {
		g.t.Fatal(err)
	}
	return s, runUntilStopped(g.t, s.Run)
}

func (g *guarded) replicaURLs() (urls []string) {
	for _, s := range g.replicas {
		urls = append(urls, s.URL())
	}
	return urls
}

// use puts a proxy that runs in front of the replicas, and waits until it has checked them.
func (g *guarded) use(s *Server) {
	g.t.Helper()
	transport := &http.Transport{}
	g.client = &http.Client{Transport: transport}
	g.t.Cleanup(transport.CloseIdleConnections)
	g.server = s
	g.url, g.admin = g.server.publicURL(), g.server.adminURL()
	g.until("every replica is ready and was polled", func() bool {
		for _, b := range g.server.registry.All() {
			if b.State() != backends.Ready || b.Load() == nil {
				return false
			}
		}
		return true
	})
}

func (g *guarded) until(what string, reached func() bool) {
	g.t.Helper()
	for deadline := time.Now().Add(time.Minute); !reached(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			g.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// load is what the proxy's poll of a replica said last.
func (g *guarded) load(replica int) *backends.Load {
	if l := g.server.registry.All()[replica].Load(); l != nil {
		return l
	}
	return new(backends.Load)
}

// stream is a response of which the first event has come.
type stream struct {
	replica  int    // that it came from, where the proxy said so
	attempts string // as the proxy said
	in       *bufio.Reader
	leave    func()
}

// ask sends a short request that may have to wait, and tells which replica
// served it; closed without a word when none did.
func (g *guarded) ask(prompt string) <-chan int {
	served := make(chan int)
	go func() {
		s, err := g.open(g.t.Context(), g.url, "sim", prompt, 2)
		if err != nil {
			g.t.Error(err)
			close(served)
			return
		}
		defer s.leave()
		served <- s.replica
	}()
	return served
}

// open asks for a stream of so many tokens, and waits for its first event.
func (g *guarded) open(ctx context.Context, base, model, prompt string, tokens int) (*stream, error) {
	ctx, leave := context.WithCancel(ctx)
	// A later turn of a conversation: a first one is also placed with regard to the later ones.
	body := fmt.Sprintf(`{"model":%q,"stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[
		{"role":"user","content":%q},{"role":"assistant","content":"Yes."},{"role":"user","content":"Go on."}]}`, model, tokens, prompt)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		leave()
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := g.client.Do(req)
	if err != nil {
		leave()
		return nil, err
	}
	s := &stream{replica: -1, attempts: resp.Header.Get("X-Warmroute-Attempts"), in: bufio.NewReader(resp.Body)}
	s.leave = func() { leave(); resp.Body.Close() }
	for i, b := range g.server.registry.All() {
		if b.Name == resp.Header.Get("X-Warmroute-Backend") {
			s.replica = i
		}
	}
	if line, err := s.in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
		s.leave()
		return nil, fmt.Errorf("status %d, %q, %v", resp.StatusCode, line, err)
	}
	return s, nil
}

// long opens a stream through the proxy that lasts until the test ends.
func (g *guarded) long(prompt string) *stream {
	g.t.Helper()
	s, err := g.open(g.t.Context(), g.url, "sim", prompt, 20_000)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(s.leave)
	return s
}

// goesTo asks for two tokens through the proxy and returns which replica gave them.
func (g *guarded) goesTo(model, prompt string) int {
	g.t.Helper()
	s, err := g.open(g.t.Context(), g.url, model, prompt, 60)
	if err != nil {
		g.t.Fatal(err)
	}
	defer s.leave()
	if _, err := io.ReadAll(s.in); err != nil {
		g.t.Fatal(err)
	}
	return s.replica
}

// openExternalStreams makes another client, which goes past the proxy, open streams at a
// replica. They last until the test ends, or leave is called.
func (g *guarded) openExternalStreams(replica, streams int, model, prompt string, tokens int) (leave func()) {
	g.t.Helper()
	ctx, leave := context.WithCancel(g.t.Context())
	g.t.Cleanup(leave)
	for i := range streams {
		s, err := g.open(ctx, g.replicas[replica].URL(), model, fmt.Sprint(i, prompt), tokens)
		if err != nil {
			g.t.Fatal(err)
		}
		g.t.Cleanup(s.leave)
	}
	return leave
}

func (g *guarded) fault(replica int, f sim.Fault) {
	g.t.Helper()
	if err := g.replicas[replica].SetFault(f); err != nil {
		g.t.Fatal(err)
	}
}
