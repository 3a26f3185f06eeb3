package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime"
	"net/http"
	"strconv"
	"time"
)

// Ask is one request, and how the client behaves that sends it.
type Ask struct {
	Path    string // below the server's URL; "" is /v1/chat/completions
	Body    []byte // JSON
	Streams bool   // whether Body asks for a stream: any other answer is a failure
	Manner  Manner
}

// Manner is how a client behaves. The zero one sends its request at once, reads
// the answer as it comes and stays to its end.
type Manner struct {
	Upload       time.Duration // the body goes in pieces, over so long
	LeaveInBody  bool          // hangs up in the middle of the body
	LeaveAfter   time.Duration // hangs up so long after it began to send; 0: never
	LeaveAtEvent int           // hangs up after so many events of a stream; 0: never
	Pause        time.Duration // reads nothing for so long once the answer has begun
}

// Reply is what became of one Ask.
type Reply struct {
	Result
	Status   int    // of the answer; 0: none began
	Backend  string // that the proxy says it came from
	Attempts int    // that the proxy says it took
	// Committed tells whether any of the answer came: an event of a stream that is
	// no error, a byte of any other body.
	Committed bool
	// Finish is the first choice's finish_reason, and Usage whether the answer had any.
	Finish string
	Usage  bool
	Answer string // the first choice's text, as far as it came
}

// Left is the Err of a client that hung up, as its Manner wants it to.
const Left = "client left"

// Ask sends one request and returns when its answer has ended, in whichever way.
// It reports nothing. A failure that ctx caused looks like a timeout.
func (p *Player) Ask(ctx context.Context, a Ask) Reply {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	sent := time.Now()
	var s stream
	err := p.exchange(ctx, a, &s)
	if err != nil && ctx.Err() != nil {
		err = errTimeout
	}
	r := Reply{
		Status: s.status, Backend: s.header.Get("X-Warmroute-Backend"),
		Committed: s.begun, Finish: s.finished, Usage: s.usage, Answer: s.answer.String(),
	}
	r.Attempts, _ = strconv.Atoi(s.header.Get("X-Warmroute-Attempts")) // 0: not told
	if err != nil {
		r.Result = s.failed(err, sent)
		return r
	}
	r.Result = p.result(&s, sent)
	return r
}

// ChatBody is a turn as the body of a chat completion.
func ChatBody(model string, t Turn, streams bool) []byte {
	r := chatRequest{
		Model:     model,
		Messages:  t.Messages,
		MaxTokens: t.AnswerTokens,
		IgnoreEOS: !t.Plain,
		Stream:    streams,
	}
	if streams {
		r.StreamOptions = &streamOptions{IncludeUsage: true}
	}
	if t.Greedy {
		r.Temperature = new(float64)
	}
	body, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return body
}

type chatRequest struct {
	Model         string         `json:"model"`
	Messages      []Message      `json:"messages"`
	MaxTokens     int            `json:"max_tokens"`
	Temperature   *float64       `json:"temperature,omitempty"`
	IgnoreEOS     bool           `json:"ignore_eos,omitempty"` // vLLM's: the answer is as long as asked for
	Stream        bool           `json:"stream"`
	StreamOptions *streamOptions `json:"stream_options,omitempty"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// Causes of failure, besides those of a stream and "status" with its code.
var (
	errConnect   = errors.New("no connection") // refused, reset or closed before the answer's headers
	errNotStream = errors.New("answer is no stream")
	errStream    = errors.New("answer is a stream")
	errEmpty     = errors.New("answer without content")
	errLong      = errors.New("answer too long") // an event above maxEvent, or text above maxText
	errTimeout   = errors.New("timeout")
	errLeft      = errors.New(Left)
)

// exchange takes in the answer to a. It returns one of a few errors without
// detail: they are counted by text.
func (p *Player) exchange(ctx context.Context, a Ask, s *stream) error {
	ctx, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	if a.Manner.LeaveAfter > 0 {
		defer time.AfterFunc(a.Manner.LeaveAfter, func() { leave(errLeft) }).Stop()
	}
	if a.Manner.LeaveAtEvent > 0 {
		s.noticed = func(events int) {
			if events == a.Manner.LeaveAtEvent {
				leave(errLeft)
			}
		}
	}
	err := p.converse(ctx, a, s, leave)
	if err != nil && context.Cause(ctx) == errLeft {
		return errLeft
	}
	return err
}

func (p *Player) converse(ctx context.Context, a Ask, s *stream, leave context.CancelCauseFunc) error {
	path := a.Path
	if path == "" {
		path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+path, bytes.NewReader(a.Body))
	if err != nil {
		return err
	}
	if a.Manner.Upload > 0 || a.Manner.LeaveInBody {
		req.Body = io.NopCloser(&upload{ctx: ctx, left: a.Body, over: a.Manner.Upload, cut: a.Manner.LeaveInBody, leave: leave})
		req.GetBody = nil // it is sent once
	}
	maps.Copy(req.Header, p.Header)
	req.Header.Set("Content-Type", "application/json")
	if p.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+p.APIKey)
	}
	resp, err := p.Client.Do(req)
	if err != nil {
		s.tell(err.Error())
		return errConnect
	}
	defer resp.Body.Close()
	s.status, s.header = resp.StatusCode, resp.Header
	if resp.StatusCode != http.StatusOK {
		// Read to its end, so that the connection can be used again.
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		s.tell(string(said))
		return errors.New("status " + strconv.Itoa(resp.StatusCode))
	}
	body := io.Reader(resp.Body)
	if a.Manner.Pause > 0 {
		body = &pausing{ctx: ctx, in: body, pause: a.Manner.Pause}
	}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch streams := kind == "text/event-stream"; {
	case a.Streams && !streams:
		return errNotStream
	case !a.Streams && streams:
		return errStream
	case !streams:
		return s.readWhole(body)
	}
	if err := s.read(body); err != nil {
		return err
	}
	if s.chunks == 0 {
		return errEmpty
	}
	return nil
}

// upload is a request's body as a slow client sends it, in ten pieces, and one
// that hangs up half-way.
type upload struct {
	ctx   context.Context
	left  []byte
	over  time.Duration
	piece int
	cut   bool
	leave context.CancelCauseFunc
}

func (u *upload) Read(b []byte) (int, error) {
	if len(u.left) == 0 {
		return 0, io.EOF
	}
	if u.piece == 0 {
		u.piece = len(u.left)/10 + 1
	} else if !sleep(u.ctx, u.over/10) {
		return 0, context.Cause(u.ctx)
	}
	n := copy(b, u.left[:min(u.piece, len(u.left))])
	u.left = u.left[n:]
	if u.cut && len(u.left) < 5*u.piece {
		u.leave(errLeft)
		return n, errLeft
	}
	return n, nil
}

// pausing stops before the second read.
type pausing struct {
	ctx   context.Context
	in    io.Reader
	pause time.Duration
	read  bool
}

func (p *pausing) Read(b []byte) (int, error) {
	if p.read && p.pause > 0 {
		sleep(p.ctx, p.pause) // the read below tells when ctx has ended
		p.pause = 0
	}
	p.read = true
	return p.in.Read(b)
}
