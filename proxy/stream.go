package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"warmroute/backends/transport"
	"warmroute/metrics"
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
	never    = 1000 * time.Hour
	// abortUsageTimeout is how long the usage may take that follows an abort. vLLM
	// sends it at once.
	abortUsageTimeout = 2 * time.Second
)

// stream relays an answer of server-sent events. Nothing of it, the status
// neither, goes to the client before the replica's engine put something out:
// vLLM sends its 200 before it has even begun.
func (a *attempt) stream(resp *http.Response) *failure {
	body := resp.Body.(*transport.Body) // what replicas' transports return
	body.SetQuietTimeout(a.settings.Keepalive)
	a.followReply()
	s := eventScanner{format: a.endpoint.format, reply: a.reply}
	held := a.p.held.Get().(*bytes.Buffer)
	chunk := a.p.chunks.Get().(*[]byte)
	err := a.awaitFirst(resp, body, &s, held, *chunk)
	a.p.chunks.Put(chunk)
	f := a.judge(resp, &s, err)
	flooded := err == nil && s.events == 0 && !s.done && s.failed == nil // committed without an event, behind so many comments
	switch {
	case f != nil:
	case flooded:
		a.decision.Commit() // and the limit goes on
	default:
		f = a.inTime()
	}
	if f != nil {
		a.p.keepHeld(held)
		return f
	}
	if s.events > 0 {
		a.begun(body)
	}
	a.chosen(resp)
	a.open(resp)
	out := lines{write: a.w.send, chunks: &a.p.chunks}
	defer out.end()
	writeErr := out.writeHead(held.Bytes())
	a.p.keepHeld(held)
	a.noteContent(&s)
	a.gaps.itl = a.p.metrics.ITL(a.outcome.Model, a.outcome.Backend)
	if s.events > 0 {
		a.gaps.chunk(a.w.wrote)
	}
	body.SetIdleTimeout(a.settings.Idle)
	quiet := a.settings.Keepalive
	if quiet == 0 {
		quiet = never
	}
	for err == nil && writeErr == nil {
		// What is read to is borrowed when something is there, not for the wait:
		// most streams wait most of the time.
		var more bool
		if more, err = body.WaitReadable(quiet); !more {
			if err == nil {
				writeErr = out.comment()
			}
			continue
		}
		var n int
		n, err = body.Read(out.space())
		before := s.events
		s.scan(out.space()[:n])
		switch {
		case s.events > 0 && before == 0 && flooded:
			a.wait.unlimit()
			a.begun(body)
		case s.events > before: // a keep-alive comment is the server's and no sign of its engine
			a.decision.RecordOutput()
		}
		if s.aborted {
			if writeErr = out.cut(n, s.scanned-s.abortAt); writeErr == nil && err == nil {
				a.readUsage(body, &s, out.space())
			}
			break
		}
		writeErr = out.advance(n)
		if s.events > before {
			a.gaps.chunk(a.w.wrote)
		}
		a.noteContent(&s)
	}
	a.finish(resp, &s, &out, err, writeErr)
	return nil
}

// begun notes a stream's first event. A stream can last for minutes; what it
// came from need not.
func (a *attempt) begun(body *transport.Body) {
	a.decision.RecordFirstEvent()
	if body.Uploaded() {
		a.freeInput()
	}
}

// awaitFirst reads into held until the stream can be judged: the engine has put
// something out, or the stream has ended one way or another.
func (a *attempt) awaitFirst(resp *http.Response, body *transport.Body, s *eventScanner, held *bytes.Buffer, chunk []byte) error {
	spoke := time.Now()
	for !s.content && !s.finished && !s.aborted && !s.done && s.failed == nil && held.Len() < heldStream {
		if s.events > 0 {
			if more, err := body.WaitReadable(roleHold); !more {
				return err
			}
		}
		n, err := body.Read(chunk)
		s.scan(chunk[:n])
		held.Write(chunk[:n])
		if err != nil && err != transport.ErrNotYet {
			return err
		}
		// Comments of the replica's own are held back with the rest, and are no sign of life to the client.
		if every := a.settings.Keepalive; every > 0 && time.Since(spoke) >= every {
			if err := a.keepAlive(resp); err != nil {
				return err
			}
			spoke = time.Now()
		}
	}
	return nil
}

// judge says whether a stream that can be judged is a failed attempt. An error
// that is the client's own fault is not: it would fail anywhere.
func (a *attempt) judge(resp *http.Response, s *eventScanner, err error) *failure {
	switch {
	case s.aborted:
		return a.abortedFailure()
	case s.content || s.finished:
		return nil
	case s.failed != nil:
		status := s.failedStatus()
		if status < 500 {
			return nil
		}
		f := &failure{
			reason: metrics.RetryErrorEvent, err: errors.New("error event before any content"), status: status, body: s.failed,
			header: http.Header{"Content-Type": {"application/json"}},
		}
		f.stops = isShutdownError(s.failed)
		f.free, f.deadly = f.stops, !f.stops
		if n := int64(len(s.failed)); a.p.chargeHeld(n) {
			f.charged = n
		} else {
			f.withoutBody(a.endpoint)
		}
		return f
	case s.done || err == nil || err == io.EOF && s.events > 0 && !a.cutShort(resp, s):
		return nil
	case err == io.EOF:
		return a.failed(errCut)
	}
	return a.failed(err)
}

// readUsage reads what follows an abort, for its usage: no client gets it.
func (a *attempt) readUsage(body *transport.Body, s *eventScanner, chunk []byte) {
	body.SetIdleTimeout(abortUsageTimeout)
	for end := time.Now().Add(abortUsageTimeout); !s.done && time.Now().Before(end); {
		n, err := body.Read(chunk)
		s.scan(chunk[:n])
		if err != nil && err != transport.ErrNotYet {
			return
		}
	}
}

// noteContent takes the time of the first content.
func (a *attempt) noteContent(s *eventScanner) {
	if s.content && a.outcome.TTFT == 0 {
		a.outcome.TTFT = time.Since(a.arrived)
		a.spans.FirstToken()
	}
}

// finish ends a committed stream. err is why there is no more to read, writeErr
// why nothing can be written any more.
func (a *attempt) finish(resp *http.Response, s *eventScanner, out *lines, err, writeErr error) {
	a.observe(&s.usage)
	a.result.AnswerTokens = s.answerTokens()
	switch {
	case writeErr == nil && !s.aborted && (s.done || err == io.EOF && !a.cutShort(resp, s)):
		out.writeRest()
		a.w.renew()
		// Many clients leave at [DONE], without waiting for the body's end.
		if s.failed == nil {
			a.result.End = router.Completed
		} else if status := s.failedStatus(); status >= 500 {
			a.brokeOff(status, errors.New("error event in mid-answer"))
		}
		return
	case writeErr != nil || a.clientLeft():
		a.left(a.w.phase(metrics.AbortInStream))
		return
	case a.cutOff():
		e := a.cutFault()
		a.result.End, a.outcome.Code = router.ClientDisconnected, e.status
		a.w.Write(append([]byte("\n\n"), e.event(a.endpoint.format)...))
		return
	}
	e := &apiError{status: http.StatusBadGateway, kind: "bad_gateway", code: "replica_failed", message: "the replica's answer broke off"}
	switch {
	case s.aborted:
		a.decision.Backend.Aborted.Add(1)
		e.code, e.message, err = "replica_aborted", "the replica aborted the request, so the answer is not complete", errAborted
	case errors.Is(err, errFirstByte):
		e = firstByteTimeout()
	case errors.Is(err, os.ErrDeadlineExceeded):
		e = &apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "idle_timeout",
			message: "the replica fell silent in mid-answer (timeouts.idle)"}
	}
	a.brokeOff(e.status, err)
	// The empty line ends an event that lacks its own.
	a.w.Write(append([]byte("\n\n"), e.event(a.endpoint.format)...))
}

// cutShort says whether a stream that seems to have ended well has not. Where
// the end of the connection is the end of the answer, only its last event tells.
func (a *attempt) cutShort(resp *http.Response, s *eventScanner) bool {
	return a.endpoint.format != plainFormat && !isFramed(resp) && !s.done
}
