package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"mime"
	"net/http"
	"strconv"
	"time"

	"warmroute/clock"
	"warmroute/lab/replay"
)

// Request is one request and the behavior of the client that sends it.
type Request struct {
	Path     string      // below the server's URL; "" is /v1/chat/completions
	Body     []byte      // JSON
	Header   http.Header // of this request, besides the client's; may be nil
	Stream   bool        // Body asks for a stream: any other response is a failure
	Behavior ClientBehavior
}

// ClientBehavior is how a client sends a request and reads the response. The
// zero value sends at once and reads to the end.
type ClientBehavior struct {
	UploadTime        time.Duration // the body is sent in pieces, over this time
	DisconnectInBody  bool          // disconnects in the middle of the body
	DisconnectAfter   time.Duration // disconnects this long after the start; 0: never
	DisconnectAtEvent int           // disconnects after this many events of a stream; 0: never
	ReadPause         time.Duration // reads nothing for this long once the response has begun
}

// Response is the outcome of one Request.
type Response struct {
	replay.Result
	Status   int    // 0: no response began
	Backend  string // from X-Warmroute-Backend
	Attempts int    // from X-Warmroute-Attempts; 0: not present
	// Committed reports whether any of the response arrived: an event of a
	// stream that is not an error, a byte of any other body.
	Committed bool
	ID        string // of a completion, as the response names it
	Finish    string // the first choice's finish_reason
	Usage     bool   // the response had a usage
	Output    string // the first choice's text, as far as it arrived
}

// The causes of failure in Result.Err, besides "status" with its code. They are
// few and constant, so that failures can be counted by cause.
const (
	NoConnection       = "no connection" // refused, reset or closed before the response's headers
	NotStream          = "response is not a stream"
	UnexpectedStream   = "response is a stream"
	StreamTruncated    = "stream truncated" // ended before [DONE]
	StreamError        = "error event in the stream"
	ResponseAborted    = "response aborted" // finish_reason "abort": the engine gave up
	NoContent          = "response without content"
	TooLong            = "response too long" // an event above maxEventBytes, or text above maxTextBytes
	BodyTruncated      = "body truncated"    // of a response that is not a stream
	NotJSON            = "response is not JSON"
	Timeout            = "timeout"
	ClientDisconnected = "client disconnected" // as its ClientBehavior says
)

// failure is one of these causes as an error.
type failure string

func (f failure) Error() string { return string(f) }

// Send sends one request and returns when its response has ended, in whichever
// way. It does not call OnResult. A failure caused by ctx is reported as Timeout.
func (c *Client) Send(ctx context.Context, q Request) Response {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	sent := time.Now()
	var in responseReader
	err := c.roundTripOrDisconnect(ctx, q, &in)
	if err != nil && ctx.Err() != nil {
		err = failure(Timeout)
	}
	r := Response{
		Status: in.status, Backend: in.header.Get("X-Warmroute-Backend"),
		Committed: in.begun, ID: in.id, Finish: in.finishReason, Usage: in.usage, Output: in.text.String(),
	}
	r.Attempts, _ = strconv.Atoi(in.header.Get("X-Warmroute-Attempts"))
	if err != nil {
		r.Result = in.failedResult(err, sent)
		return r
	}
	r.Result = c.completeResult(&in, sent)
	return r
}

// ChatBody returns a turn as the body of a chat completion.
func ChatBody(model string, t Turn, stream bool) []byte {
	r := chatRequest{
		Model:     model,
		Messages:  t.Messages,
		MaxTokens: t.OutputTokens,
		IgnoreEOS: !t.OpenAIOnly,
		Stream:    stream,
	}
	if stream {
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
	IgnoreEOS     bool           `json:"ignore_eos,omitempty"` // vLLM's: the output has exactly MaxTokens
	Stream        bool           `json:"stream"`
	StreamOptions *streamOptions `json:"stream_options,omitempty"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// roundTripOrDisconnect sends q and reads the response into in, unless q's behavior is to disconnect
// first. Its error is a failure.
func (c *Client) roundTripOrDisconnect(ctx context.Context, q Request, in *responseReader) error {
	ctx, disconnect := context.WithCancelCause(ctx)
	defer disconnect(nil)
	if q.Behavior.DisconnectAfter > 0 {
		defer time.AfterFunc(q.Behavior.DisconnectAfter, func() { disconnect(failure(ClientDisconnected)) }).Stop()
	}
	if q.Behavior.DisconnectAtEvent > 0 {
		in.onEvent = func(events int) {
			if events == q.Behavior.DisconnectAtEvent {
				disconnect(failure(ClientDisconnected))
			}
		}
	}
	err := c.roundTrip(ctx, q, in, disconnect)
	if err != nil && context.Cause(ctx) == failure(ClientDisconnected) {
		return failure(ClientDisconnected)
	}
	return err
}

// roundTrip sends q and reads the response into in. A request body that is to disconnect calls disconnect.
func (c *Client) roundTrip(ctx context.Context, q Request, in *responseReader, disconnect context.CancelCauseFunc) error {
	path := q.Path
	if path == "" {
		path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, bytes.NewReader(q.Body))
	if err != nil {
		return err
	}
	if q.Behavior.UploadTime > 0 || q.Behavior.DisconnectInBody {
		req.Body = io.NopCloser(&slowDisconnectingBody{ctx: ctx, left: q.Body, behavior: q.Behavior, disconnect: disconnect})
		req.GetBody = nil // it is sent once
	}
	maps.Copy(req.Header, c.Header)
	maps.Copy(req.Header, q.Header)
	req.Header.Set("Content-Type", "application/json")
	if c.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		in.setDetail(err.Error())
		return failure(NoConnection)
	}
	defer resp.Body.Close()
	in.status, in.header = resp.StatusCode, resp.Header
	if resp.StatusCode != http.StatusOK {
		// Read to the end, so that the connection can be reused.
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		in.setDetail(string(body))
		return failure("status " + strconv.Itoa(resp.StatusCode))
	}
	body := io.Reader(resp.Body)
	if q.Behavior.ReadPause > 0 {
		body = &pausingResponseReader{ctx: ctx, in: body, pause: q.Behavior.ReadPause}
	}
	mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch stream := mediaType == "text/event-stream"; {
	case q.Stream && !stream:
		return failure(NotStream)
	case !q.Stream && stream:
		return failure(UnexpectedStream)
	case !stream:
		return in.readJSON(body)
	}
	if err := in.readStream(body); err != nil {
		return err
	}
	if in.chunks == 0 {
		return failure(NoContent)
	}
	return nil
}

// slowDisconnectingBody is a request's body that is sent in ten pieces over
// behavior.UploadTime, or disconnects half-way.
type slowDisconnectingBody struct {
	ctx        context.Context
	left       []byte
	pieceBytes int
	behavior   ClientBehavior
	disconnect context.CancelCauseFunc
}

func (u *slowDisconnectingBody) Read(b []byte) (int, error) {
	if len(u.left) == 0 {
		return 0, io.EOF
	}
	if u.pieceBytes == 0 {
		u.pieceBytes = len(u.left)/10 + 1
	} else if !clock.Sleep(u.ctx, u.behavior.UploadTime/10) {
		return 0, context.Cause(u.ctx)
	}
	n := copy(b, u.left[:min(u.pieceBytes, len(u.left))])
	u.left = u.left[n:]
	if u.behavior.DisconnectInBody && len(u.left) < 5*u.pieceBytes {
		u.disconnect(failure(ClientDisconnected))
		return n, failure(ClientDisconnected)
	}
	return n, nil
}

// pausingResponseReader sleeps once, before the second read.
type pausingResponseReader struct {
	ctx   context.Context
	in    io.Reader
	pause time.Duration
	read  bool
}

func (p *pausingResponseReader) Read(b []byte) (int, error) {
	if p.read && p.pause > 0 {
		clock.Sleep(p.ctx, p.pause) // the read below fails if ctx has ended
		p.pause = 0
	}
	p.read = true
	return p.in.Read(b)
}
