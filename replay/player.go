package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Player sends a workload's requests to one OpenAI server, streaming, and times
// the answers. Every field is set before the first Play and not changed after.
type Player struct {
	URL    string // of the server, without /v1
	Model  string
	APIKey string       // sent as a bearer token; empty: none
	Client *http.Client // NewClient's is meant for this

	// Speed is how many times faster than real ones the replicas run: the
	// workload's times are divided by it, measured ones multiplied.
	Speed float64
	// Timeout ends a request that would hang forever, in wall time.
	Timeout time.Duration
	// MaxInFlight bounds the requests of a trace that are sent at once; a
	// request that waits for its place has been due all the while. 0: no bound.
	MaxInFlight int

	// Report is called once for each request that ended before the context
	// did, from many goroutines at once.
	Report func(Result)
}

// NewClient returns a client for many streams at once to one server. Close its
// idle connections when done.
func NewClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 4096,
		// vLLM closes a connection that was idle for 5 s; a request that
		// is just being written to it would be lost.
		IdleConnTimeout:    3 * time.Second,
		DisableCompression: true,
	}}
}

// PlayTrace sends each request of t when it is due, and returns when all have
// ended or ctx has.
func (p *Player) PlayTrace(ctx context.Context, t *Trace) {
	var places chan struct{}
	if p.MaxInFlight > 0 {
		places = make(chan struct{}, p.MaxInFlight)
	}
	start := time.Now()
	var wg sync.WaitGroup
	for _, r := range t.Requests {
		due := start.Add(p.wall(r.At))
		if !sleep(ctx, time.Until(due)) {
			break
		}
		wg.Go(func() {
			if places != nil {
				select {
				case places <- struct{}{}:
				case <-ctx.Done():
					return
				}
				defer func() { <-places }()
			}
			p.play(ctx, due, Turn{Messages: r.Messages(t.BlockTokens), AnswerTokens: r.AnswerTokens})
		})
	}
	wg.Wait()
}

// PlayChats keeps c.AtATime conversations going, until all have ended or ctx
// has. A conversation with a failed turn ends there.
func (p *Player) PlayChats(ctx context.Context, c *Chats) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range c.AtATime {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if c.Sessions > 0 && i >= c.Sessions {
					return
				}
				p.playSession(ctx, c.Session(i))
			}
		})
	}
	wg.Wait()
}

func (p *Player) playSession(ctx context.Context, s *Session) {
	for answer := ""; ; {
		turn, ok := s.Next(answer)
		if !ok || !sleep(ctx, p.wall(turn.Think)) {
			return
		}
		if answer, ok = p.play(ctx, time.Now(), turn); !ok {
			return
		}
	}
}

// play sends one request, reports it, and returns its answer and whether it
// came whole.
func (p *Player) play(ctx context.Context, due time.Time, turn Turn) (answer string, ok bool) {
	attempt, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	var s stream
	err := p.send(attempt, turn, &s)
	if ctx.Err() != nil {
		return "", false // the run is over; nobody's fault
	}
	if err != nil {
		if errors.Is(attempt.Err(), context.DeadlineExceeded) {
			err = errTimeout
		}
		p.Report(Result{Err: err.Error()})
		return "", false
	}
	r := Result{
		TTFT:             p.model(s.first.Sub(due)),
		E2E:              p.model(s.end.Sub(due)),
		PromptTokens:     s.prompt,
		CachedTokens:     s.cached,
		CompletionTokens: s.completion,
	}
	if s.chunks > 1 {
		r.ITL = p.model(s.last.Sub(s.first)) / time.Duration(s.chunks-1)
	}
	p.Report(r)
	return s.answer.String(), true
}

// Causes of failure, besides those of a stream and "status" with its code.
var (
	errConnect   = errors.New("no connection") // refused, reset or closed before the answer's headers
	errNotStream = errors.New("answer is no stream")
	errEmpty     = errors.New("answer without content")
	errTimeout   = errors.New("timeout")
)

// send returns one of a few errors without detail: they are counted by text.
func (p *Player) send(ctx context.Context, turn Turn, s *stream) error {
	body, err := json.Marshal(chatRequest{
		Model:         p.Model,
		Messages:      turn.Messages,
		MaxTokens:     turn.AnswerTokens,
		IgnoreEOS:     true,
		Stream:        true,
		StreamOptions: streamOptions{IncludeUsage: true},
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if p.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+p.APIKey)
	}
	resp, err := p.Client.Do(req)
	if err != nil {
		return errConnect
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		// Read to its end, so that the connection can be used again.
		io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind != "text/event-stream" {
		return errNotStream
	}
	if err := s.read(resp.Body); err != nil {
		return err
	}
	if s.chunks == 0 {
		return errEmpty
	}
	return nil
}

type chatRequest struct {
	Model         string        `json:"model"`
	Messages      []Message     `json:"messages"`
	MaxTokens     int           `json:"max_tokens"`
	IgnoreEOS     bool          `json:"ignore_eos"` // vLLM's: the answer is as long as asked for
	Stream        bool          `json:"stream"`
	StreamOptions streamOptions `json:"stream_options"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// wall converts the replicas' time to ours, model ours to theirs.
func (p *Player) wall(d time.Duration) time.Duration {
	return time.Duration(float64(d) / p.Speed)
}

func (p *Player) model(d time.Duration) time.Duration {
	return time.Duration(float64(d) * p.Speed)
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
