package replay

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Player sends requests to one OpenAI server and times the answers: those of a
// workload, streaming (PlayTrace, PlayChats), or one at a time (Ask). Every field is set before the first Play and not changed after.
type Player struct {
	URL    string // of the server, without /v1
	Model  string
	APIKey string       // sent as a bearer token; empty: none
	Header http.Header  // sent with each request, beside what it has anyway; nil: nothing
	Client *http.Client // NewClient's is meant for this

	// Speed is how many times faster than real ones the replicas run: the
	// workload's times are divided by it, measured ones multiplied.
	Speed float64
	// Timeout ends a request that would hang forever, in wall time.
	Timeout time.Duration
	// MaxInFlight bounds the requests of a trace that are sent at once; a
	// request that waits for its place has been due all the while. 0: no bound.
	MaxInFlight int

	// Plain is that of every Turn.
	Plain bool
	// Enough, once closed, ends PlayChats when the answers under way have come. nil: never.
	Enough <-chan struct{}

	// Report is called once for each request of a workload that ended before the
	// context did, from many goroutines at once.
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
// has. A conversation with a failed turn ends there, and its user waits for as
// long as the answer says, or a little longer after each failure in a row: a
// server that refuses everything is not to be asked as fast as it refuses.
func (p *Player) PlayChats(ctx context.Context, c *Chats) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range c.AtATime {
		wg.Go(func() {
			for failures := 0; p.pause(ctx, p.wall(patience(failures))); {
				i := int(next.Add(1)) - 1
				if c.Sessions > 0 && i >= c.Sessions {
					return
				}
				last := p.playSession(ctx, c.Session(i))
				if last.Err == "" {
					failures = 0
					continue
				}
				failures++
				if !p.pause(ctx, min(last.RetryAfter, longestWait)) {
					return
				}
			}
		})
	}
	wg.Wait()
}

// longestWait is how long a user waits after a failure.
const longestWait = 30 * time.Second

// patience is how long a user waits after so many failures in a row, where the
// server does not say.
func patience(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	return min(100*time.Millisecond<<min(failures-1, 10), 5*time.Second)
}

// playSession returns the last result, the zero one where nothing came of it.
func (p *Player) playSession(ctx context.Context, s *Session) (last Result) {
	for answer := ""; ; {
		turn, ok := s.Next(answer)
		if !ok || !p.pause(ctx, p.wall(turn.Think)) {
			return last
		}
		if last, answer = p.play(ctx, time.Now(), turn); last.Err != "" {
			return last
		}
	}
}

// play sends one request, reports it, and returns what became of it and its answer.
func (p *Player) play(ctx context.Context, due time.Time, turn Turn) (r Result, answer string) {
	turn.Plain = p.Plain
	attempt, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	var s stream
	err := p.exchange(attempt, Ask{Body: ChatBody(p.Model, turn, true), Streams: true}, &s)
	if ctx.Err() != nil {
		return Result{}, "" // the run is over; nobody's fault
	}
	if err != nil {
		if errors.Is(attempt.Err(), context.DeadlineExceeded) {
			err = errTimeout
		}
		r = s.failed(err, due)
	} else {
		r = p.result(&s, due)
	}
	p.Report(r)
	return r, s.answer.String()
}

// result is that of an answer that came whole, to a request that was due at due.
func (p *Player) result(s *stream, due time.Time) Result {
	r := Result{
		Sent:             due,
		TTFT:             p.model(s.first.Sub(due)),
		E2E:              p.model(s.end.Sub(due)),
		PromptTokens:     s.prompt,
		CachedTokens:     s.cached,
		CompletionTokens: s.completion,
		CachedKnown:      s.cachedKnown,
		Impossible:       s.impossible,
	}
	if s.chunks > 1 {
		r.ITL = p.model(s.last.Sub(s.first)) / time.Duration(s.chunks-1)
	}
	return r
}

// wall converts the replicas' time to ours, model ours to theirs.
func (p *Player) wall(d time.Duration) time.Duration {
	return time.Duration(float64(d) / p.Speed)
}

func (p *Player) model(d time.Duration) time.Duration {
	return time.Duration(float64(d) * p.Speed)
}

// pause returns false when ctx ended first, or there is enough.
func (p *Player) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-p.Enough:
	}
	select {
	case <-p.Enough:
		return false
	default:
		return ctx.Err() == nil
	}
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
