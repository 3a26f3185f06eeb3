package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/tidwall/gjson"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/router"
)

const (
	chunkBytes = 4 << 10
	// maxBufferedStreamBytes is how much of a stream may come before its first event, as
	// comments, until it is passed on all the same.
	maxBufferedStreamBytes = 1 << 20
	// roleEventDelay is how long a first event that carries only a role is held back for
	// the next one. The engine's first output makes both, so the next one follows
	// at once; and if it says that the answer was aborted, another backend is asked.
	roleEventDelay = 25 * time.Millisecond
	noKeepalive    = 1000 * time.Hour
	// abortUsageTimeout is how long the usage may take that follows an abort. vLLM
	// sends it at once.
	abortUsageTimeout = 2 * time.Second
)

// relayStream relays an answer of server-sent events. Nothing of it, the status
// neither, goes to the client before the replica's engine put something out:
// vLLM sends its 200 before it has even begun.
func (a *attempt) relayStream(resp *http.Response) *failure {
	body := resp.Body.(*transport.Body) // what replicas' transports return
	body.SetQuietTimeout(a.settings.Keepalive)
	a.trackReply()
	s := eventScanner{format: a.endpoint.format, reply: a.reply}
	held := a.proxy.buffers.Get().(*bytes.Buffer)
	chunk := a.proxy.chunks.Get().(*[]byte)
	err := a.awaitFirstEvent(resp, body, &s, held, *chunk)
	a.proxy.chunks.Put(chunk)
	f := a.checkStream(resp, &s, err)
	flooded := err == nil && s.events == 0 && !s.done && s.errorEvent == nil // committed without an event, behind so many comments
	switch {
	case f != nil:
	case flooded:
		a.decision.Commit() // and the limit goes on
	default:
		f = a.commitResponse()
	}
	if f != nil {
		a.proxy.putBuffer(held)
		return f
	}
	if s.events > 0 {
		a.recordFirstEvent(body)
	}
	a.recordResponse(resp)
	a.sendHeader(resp)
	out := lineWriter{write: a.client.writeAndFlush, chunks: &a.proxy.chunks}
	defer out.releaseChunk()
	writeErr := out.start(held.Bytes())
	a.proxy.putBuffer(held)
	a.recordFirstToken(&s)
	a.itl.itl = a.proxy.metrics.ITL(a.outcome.Model, a.outcome.Backend)
	if s.events > 0 {
		a.itl.observe(a.client.writeStartedAt)
	}
	body.SetIdleTimeout(a.settings.Idle)
	quiet := a.settings.Keepalive
	if quiet == 0 {
		quiet = noKeepalive
	}
	for err == nil && writeErr == nil {
		// What is read to is borrowed when something is there, not for the wait:
		// most streams wait most of the time.
		var more bool
		if more, err = body.WaitReadable(quiet); !more {
			if err == nil {
				writeErr = out.writeComment()
			}
			continue
		}
		var n int
		n, err = body.Read(out.free())
		before := s.events
		s.scan(out.free()[:n])
		switch {
		case s.events > 0 && before == 0 && flooded:
			_ = a.context.commit()
			a.recordFirstEvent(body)
		case s.events > before: // a keep-alive comment is the server's and no sign of its engine
			a.decision.RecordOutput()
		}
		if s.aborted {
			if writeErr = out.acceptUntil(n, s.scannedBytes-s.abortOffset); writeErr == nil && err == nil {
				a.readUsage(body, &s, out.free())
			}
			break
		}
		writeErr = out.accept(n)
		if s.events > before {
			a.itl.observe(a.client.writeStartedAt)
		}
		a.recordFirstToken(&s)
	}
	a.finishStream(resp, &s, &out, err, writeErr)
	return nil
}

// recordFirstEvent notes a stream's first event. A stream can last for minutes; what it
// came from need not.
func (a *attempt) recordFirstEvent(body *transport.Body) {
	a.decision.RecordFirstEvent()
	if body.Uploaded() {
		a.releaseInput()
	}
}

// awaitFirstEvent reads into held until the stream can be judged: the engine has put
// something out, or the stream has ended one way or another.
func (a *attempt) awaitFirstEvent(resp *http.Response, body *transport.Body, s *eventScanner, held *bytes.Buffer, chunk []byte) error {
	spoke := time.Now()
	for !s.content && !s.finished && !s.aborted && !s.done && s.errorEvent == nil && held.Len() < maxBufferedStreamBytes {
		if s.events > 0 {
			if more, err := body.WaitReadable(roleEventDelay); !more {
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
			if err := a.sendKeepAlive(resp); err != nil {
				return err
			}
			spoke = time.Now()
		}
	}
	return nil
}

// checkStream says whether a stream that can be judged is a failed attempt. An error
// that is the client's own fault is not: it would fail anywhere.
func (a *attempt) checkStream(resp *http.Response, s *eventScanner, err error) *failure {
	switch {
	case s.aborted:
		return a.abortedFailure()
	case s.content || s.finished:
		return nil
	case s.errorEvent != nil:
		status := s.errorStatus()
		if status < 500 {
			return nil
		}
		f := &failure{
			reason: metrics.RetryErrorEvent, err: errors.New("error event before any content"), status: status, body: s.errorEvent,
			header: http.Header{"Content-Type": {"application/json"}},
		}
		f.shuttingDown = vllm.IsShutdownError(s.errorEvent)
		f.uncharged, f.mayHaveCrashed = f.shuttingDown, !f.shuttingDown
		if n := int64(len(s.errorEvent)); a.proxy.reserveBuffer(n) {
			f.charged = n
		} else {
			f.replaceBody(a.endpoint)
		}
		return f
	case s.done || err == nil || err == io.EOF && s.events > 0 && !a.isTruncated(resp, s):
		return nil
	case err == io.EOF:
		return a.classify(errTruncated)
	}
	return a.classify(err)
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

// recordFirstToken takes the time of the first content.
func (a *attempt) recordFirstToken(s *eventScanner) {
	if s.content && a.outcome.TTFT == 0 {
		a.outcome.TTFT = time.Since(a.arrivedAt)
		a.spans.FirstToken()
	}
}

// finishStream ends a committed stream. err is why there is no more to read, writeErr
// why nothing can be written any more.
func (a *attempt) finishStream(resp *http.Response, s *eventScanner, out *lineWriter, err, writeErr error) {
	a.recordUsage(&s.usage)
	a.result.AnswerTokens = s.completionTokens()
	switch {
	case writeErr == nil && !s.aborted && (s.done || err == io.EOF && !a.isTruncated(resp, s)):
		out.flushPending()
		a.client.extendDeadline()
		// Many clients leave at [DONE], without waiting for the body's end.
		if s.errorEvent == nil {
			a.result.End = router.Completed
		} else if status := s.errorStatus(); status >= 500 {
			a.recordTruncated(status, errors.New("error event in mid-answer"))
		}
		return
	case writeErr != nil || a.isDisconnected():
		a.recordDisconnect(a.client.abortPhase(metrics.AbortInStream))
		return
	case a.isCutOff():
		e := a.cutOffError()
		a.result.End, a.outcome.Code = router.ClientDisconnected, e.status
		a.client.Write(append([]byte("\n\n"), e.event(a.endpoint.format)...))
		return
	}
	e := &apiError{status: http.StatusBadGateway, kind: "bad_gateway", code: "replica_failed", message: "the replica's answer broke off"}
	switch {
	case s.aborted:
		a.decision.Backend.Aborted.Add(1)
		e.code, e.message, err = "replica_aborted", "the replica aborted the request, so the answer is not complete", errAborted
	case errors.Is(err, errFirstByte):
		e = firstByteTimeoutError()
	case errors.Is(err, os.ErrDeadlineExceeded):
		e = &apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "idle_timeout",
			message: "the replica fell silent in mid-answer (timeouts.idle)"}
	}
	a.recordTruncated(e.status, err)
	// The empty line ends an event that lacks its own.
	a.client.Write(append([]byte("\n\n"), e.event(a.endpoint.format)...))
}

// isTruncated says whether a stream that seems to have ended well has not. Where
// the end of the connection is the end of the answer, only its last event tells.
func (a *attempt) isTruncated(resp *http.Response, s *eventScanner) bool {
	return a.endpoint.format != plainFormat && !isFramed(resp) && !s.done
}

// lineWriter passes a stream of server-sent events on in whole lines, as soon as each
// is whole. The part of a line that a dying replica leaves would be broken JSON
// to the client, and keep it from the error event that follows; no client can
// use half a line sooner. A line that names an event goes on together with the
// next one, so that the event may still be withheld when its data is known. A line
// longer than a chunk goes on as it comes.
type lineWriter struct {
	write   func([]byte) error
	chunks  *sync.Pool // of *[]byte
	chunk   *[]byte    // nil: none is borrowed
	pending int        // bytes of chunk that are not passed on yet
	tail    [3]byte    // the last bytes written
}

// buf is the chunk that is borrowed now.
func (l *lineWriter) buf() []byte {
	if l.chunk == nil {
		l.chunk = l.chunks.Get().(*[]byte)
	}
	return *l.chunk
}

// free is where the next bytes of the stream are to be read to, before advance.
func (l *lineWriter) free() []byte { return l.buf()[l.pending:] }

// releaseIfEmpty gives the chunk back, unless it holds something.
func (l *lineWriter) releaseIfEmpty() {
	if l.pending == 0 {
		l.releaseChunk()
	}
}

// releaseChunk gives the chunk back.
func (l *lineWriter) releaseChunk() {
	if l.chunk != nil {
		l.chunks.Put(l.chunk)
		l.chunk = nil
	}
}

// accept takes in n bytes that were read to space.
func (l *lineWriter) accept(n int) error {
	defer l.releaseIfEmpty()
	buf, have := l.buf(), l.pending+n
	whole := completeLinesLength(buf[:have])
	switch {
	case whole > 0:
	case have == len(buf):
		whole = have
	default:
		l.pending = have
		return nil
	}
	err := l.forward(buf[:whole])
	l.pending = copy(buf, buf[whole:have])
	return err
}

// acceptUntil takes in n bytes that were read to space, and passes on what came but for the
// last bytes, so many as left says: they begin with an event that is to be withheld.
// If its beginning was passed on before, the rest of it follows. Nothing is kept.
func (l *lineWriter) acceptUntil(n int, left int64) error {
	defer l.releaseIfEmpty()
	have := l.pending + n
	l.pending = 0
	if left <= int64(have) {
		have -= int(left)
	}
	if have == 0 {
		return nil
	}
	return l.forward(l.buf()[:have])
}

// completeLinesLength is the length of the lines that b begins with, without a last one that
// names an event.
func completeLinesLength(b []byte) int {
	end := bytes.LastIndexByte(b, '\n') + 1
	if end == 0 {
		return 0
	}
	last := bytes.LastIndexByte(b[:end-1], '\n') + 1
	if bytes.HasPrefix(b[last:], []byte("event:")) {
		return last
	}
	return end
}

// start writes what came before the stream was committed.
func (l *lineWriter) start(head []byte) error {
	defer l.releaseIfEmpty()
	buf, whole := l.buf(), completeLinesLength(head)
	if len(head)-whole >= len(buf) {
		whole = len(head)
	}
	l.pending = copy(buf, head[whole:])
	return l.forward(head[:whole])
}

// flushPending writes what is kept. The stream is over.
func (l *lineWriter) flushPending() {
	if l.pending > 0 {
		l.write(l.buf()[:l.pending])
	}
}

func (l *lineWriter) forward(b []byte) error {
	n := min(len(b), len(l.tail))
	copy(l.tail[:], l.tail[n:])
	copy(l.tail[len(l.tail)-n:], b[len(b)-n:])
	return l.write(b)
}

// writeComment writes a keep-alive comment, unless it would part an event: clients
// take an empty line for its end.
func (l *lineWriter) writeComment() error {
	if tail := l.tail[:]; bytes.HasSuffix(tail, []byte("\n\n")) || bytes.HasSuffix(tail, []byte("\n\r\n")) {
		return l.write([]byte(keepAliveComment))
	}
	return nil
}

// keepAliveComment is a comment to clients, and traffic to what stands between.
const keepAliveComment = ": keep-alive\n\n"

// sendKeepAlive tells the client of a silent stream that it goes on. Its header names
// this attempt, the first that took the request. Nothing is committed by it: a
// failure is still retried elsewhere, and only one that nobody betters ends the
// stream, with an error event.
func (a *attempt) sendKeepAlive(resp *http.Response) error {
	a.sendHeader(resp)
	return a.client.writeAndFlush([]byte(keepAliveComment))
}

// sendHeader sends the header of a stream, once.
func (a *attempt) sendHeader(resp *http.Response) {
	if a.headersSent {
		return
	}
	a.headersSent = true
	a.responseHeader(a.decision, resp.Header)
	a.client.WriteHeader(resp.StatusCode)
}

// relayErrorEvent is for an answer that is no stream, to a client that has the
// header of one.
func (a *attempt) relayErrorEvent(resp *http.Response) *failure {
	body, err := a.readErrorBody(resp)
	defer a.proxy.bufferedBytes.Add(-int64(len(body)))
	if err != nil && !errors.Is(err, errErrorBodyTooLong) && !errors.Is(err, errErrorBodyMemory) {
		return a.classify(err)
	}
	a.sendError(replicaError(resp.StatusCode, body))
	return nil
}

// replicaError is what a replica answered in place of a stream, as far as an error
// event can say it.
func replicaError(status int, body []byte) *apiError {
	if status < 400 {
		return &apiError{status: http.StatusBadGateway, kind: "bad_gateway", code: "replica_failed", message: "the replica's answer is not the stream that was asked for"}
	}
	e := &apiError{status: status, kind: "bad_gateway", code: "replica_failed", message: "the replica answered " + http.StatusText(status)}
	said := gjson.ParseBytes(body)
	if inner := said.Get("error"); inner.IsObject() {
		said = inner
	}
	if message := said.Get("message"); message.Type == gjson.String {
		e.message, e.fromReplica = message.Str, true
	}
	if kind := said.Get("type"); kind.Type == gjson.String {
		e.kind = kind.Str
	}
	return e
}

// chunkIntervals observes the time between the chunks of a stream that carry events, by the
// time at which each was written, which is known anyway: reading the clock would
// cost more than all the rest of it.
type chunkIntervals struct {
	itl  prometheus.Observer
	last time.Time // zero: there was none yet
}

func (g *chunkIntervals) observe(at time.Time) {
	if !g.last.IsZero() {
		g.itl.Observe(at.Sub(g.last).Seconds())
	}
	g.last = at
}
