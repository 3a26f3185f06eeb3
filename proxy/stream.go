package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"warmroute/backends/transport"
	"warmroute/router"
)

const (
	chunkBytes = 4 << 10
	// heldStream is how much of a stream may come before its first event, as
	// comments, until it is passed on all the same.
	heldStream = 1 << 20
	// roleHold is how long a first event that carries only a role is held back for
	// the next one. The engine's first output makes both, so the next one follows
	// at once; and if it says that the answer was aborted, another backend is asked.
	roleHold = 25 * time.Millisecond
)

// stream relays an answer of server-sent events. Nothing of it, the status
// neither, goes to the client before the replica's engine put something out:
// vLLM sends its 200 before it has even begun.
func (a *attempt) stream(resp *http.Response) *failure {
	body := resp.Body.(*transport.Body)
	s := eventScanner{format: a.endpoint.format}
	chunk := a.p.chunks.Get().(*[]byte)
	defer a.p.chunks.Put(chunk)

	held := a.p.held.Get().(*bytes.Buffer)
	err := a.awaitFirst(body, &s, held, *chunk)
	if f := a.judge(&s, err); f != nil || a.outcome.Code == statusClientLeft {
		a.p.keepHeld(held)
		return f
	}
	if a.patience != nil {
		a.patience.Stop()
	}
	a.decision.FirstEvent()
	a.commit(resp)
	a.w.WriteHeader(resp.StatusCode)
	if body.Uploaded() {
		a.freeInput() // a stream can last for minutes; what it came from need not
	}
	flush := http.NewResponseController(a.w).Flush
	_, writeErr := a.w.Write(held.Bytes())
	a.p.keepHeld(held)
	if writeErr == nil {
		writeErr = flush()
	}
	a.noteContent(&s)
	body.SetIdleTimeout(a.p.idle)
	for err == nil && writeErr == nil {
		var n int
		n, err = body.Read(*chunk)
		if n > 0 {
			s.scan((*chunk)[:n])
			if _, writeErr = a.w.Write((*chunk)[:n]); writeErr == nil {
				writeErr = flush()
			}
			a.noteContent(&s)
		}
	}
	a.finish(resp, &s, err, writeErr)
	return nil
}

// awaitFirst reads into held until the stream can be judged: the engine has put
// something out, or the stream has ended one way or another.
func (a *attempt) awaitFirst(body *transport.Body, s *eventScanner, held *bytes.Buffer, chunk []byte) error {
	for !s.content && !s.finished && !s.aborted && !s.done && s.failed == nil && held.Len() < heldStream {
		if s.events > 0 {
			if more, err := body.WaitReadable(roleHold); !more {
				return err
			}
		}
		n, err := body.Read(chunk)
		s.scan(chunk[:n])
		held.Write(chunk[:n])
		if err != nil {
			return err
		}
	}
	return nil
}

// judge says whether a stream that can be judged is a failed attempt. An error
// that is the client's own fault is not: it would fail anywhere.
func (a *attempt) judge(s *eventScanner, err error) *failure {
	switch {
	case s.content || s.finished || s.done && s.failed == nil:
		return nil
	case s.failed != nil:
		status, body := s.failure()
		if status < 500 {
			return nil
		}
		return &failure{
			reason: "error_event", err: errors.New("error event before any content"), status: status, body: body,
			header: http.Header{"Content-Type": {"application/json"}},
		}
	case s.aborted:
		return a.abortedFailure()
	case err == io.EOF && s.events > 0:
		return nil
	case err == io.EOF:
		return &failure{reason: "broken", err: errors.New("the stream ended without an event")}
	case err != nil:
		return a.failed(err)
	}
	return nil
}

// noteContent takes the time of the first content.
func (a *attempt) noteContent(s *eventScanner) {
	if s.content && a.outcome.TTFT == 0 {
		a.outcome.TTFT = time.Since(a.arrived)
	}
}

// finish ends a committed stream. err is why there is no more to read, writeErr
// why nothing can be written any more.
func (a *attempt) finish(resp *http.Response, s *eventScanner, err, writeErr error) {
	a.tokens = s.answerTokens()
	a.observe(&s.usage)
	if writeErr != nil || a.r.Context().Err() != nil {
		a.left("in_stream")
		return
	}
	if err == io.EOF && !a.cutShort(resp, s) {
		a.end = router.Served
		return
	}
	a.end = router.Broken
	e := &apiError{kind: "bad_gateway", code: "replica_failed", message: "the replica's answer broke off"}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		e = &apiError{kind: "timeout", code: "idle_timeout", message: "the replica fell silent in mid-answer (timeouts.idle)"}
	}
	a.p.log.Warn("stream broke off", "backend", a.decision.Backend.Name, "error", err, "request_id", a.id)
	a.p.suspect(a.decision.Backend)
	if s.midLine {
		a.w.Write([]byte("\n\n")) // ends the event that was cut
	}
	a.w.Write(e.event(a.endpoint.format))
}

// cutShort says whether a stream that seems to have ended well has not. Where
// the end of the connection is the end of the answer, only [DONE] tells.
func (a *attempt) cutShort(resp *http.Response, s *eventScanner) bool {
	framed := resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
	says := a.endpoint.format == chatFormat || a.endpoint.format == completionFormat
	return !framed && says && !s.done
}
