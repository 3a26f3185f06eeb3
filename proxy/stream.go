package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/router"
)

const (
	chunkBytes = 4 << 10
	// roleEventDelay is how long events without content are buffered for what follows: an engine that is
	// shutting down sends the role, and directly after it an abort. Then another backend is asked.
	roleEventDelay = 25 * time.Millisecond
	noKeepalive    = 1000 * time.Hour
	// abortUsageTimeout bounds the wait for the usage after an abort. vLLM sends it at once.
	abortUsageTimeout = 2 * time.Second
)

// replicaBody is the body of a replica's response.
type replicaBody interface {
	io.ReadCloser

	// SetIdleTimeout makes reads fail with os.ErrDeadlineExceeded after a wait of d.
	SetIdleTimeout(d time.Duration)
	// SetQuietTimeout makes Read return transport.ErrQuietTimeout after a wait of d; 0: never.
	SetQuietTimeout(d time.Duration)
	// WaitReadable waits at most d, and reports whether Read would not wait.
	WaitReadable(d time.Duration) (bool, error)
	// Uploaded reports whether the request's body is not needed any more.
	Uploaded() bool
	// ForbidReuse keeps the connection from other requests until AllowReuse; Close closes it before.
	ForbidReuse()
	// AllowReuse ends ForbidReuse.
	AllowReuse()
}

// streamRelay relays a response of server-sent events. Nothing of it, not even its status, goes to the client
// before the engine has output something: vLLM sends its 200 before it has begun, and of a decode leg also the first
// event, which has only the role, before an error.
type streamRelay struct {
	attempt  *attempt
	resp     *http.Response
	body     replicaBody
	events   eventScanner
	out      lineWriter
	pieces   pieceWriter  // where out writes
	unsaved  *storedInput // of a response that is not remembered yet; nil: it is, or is not to be
	withheld bool         // the replica's error event, as it may name the handover
	flooded  bool         // committed without an event, behind more than may be buffered
	readErr  error        // why there is no more to read
	writeErr error        // why nothing can be written any more
}

// relayStream returns nil when the stream was committed to the client, whatever its end.
func (a *attempt) relayStream(resp *http.Response, body replicaBody) *fault.Failure {
	a.startReplyHashing()
	s := &streamRelay{attempt: a, resp: resp, body: body, events: eventScanner{format: a.req.endpoint.Format, reply: a.reply}}
	stored, maxTokens := a.req.input.stored, a.req.input.request.MaxOutputTokens // input may be released before the end of the stream
	if a.req.endpoint.Format == api.ResponsesFormat && !a.req.input.stored.unstored {
		s.unsaved = &stored
	}
	s.pieces = pieceWriter{client: &a.req.client, passThrough: a.req.allowsTransferParams(), blanker: transferParamsBlanker{events: true}}
	s.out = lineWriter{to: &s.pieces, chunks: &a.req.proxy.pools.chunks}
	defer s.out.releaseChunk()
	buffered := a.req.proxy.buffers.get()
	reserved, f := s.readAndCommit(buffered)
	if f == nil {
		s.rememberResponse()
		s.sendBeginning(buffered.Bytes())
	} else if f.Done {
		s.attempt.result.OutputTokens = s.events.completionTokens()
	}
	a.req.proxy.buffers.put(buffered)
	a.req.proxy.buffers.release(reserved)
	if f == nil {
		s.relayChunks()
		s.finish()
	}
	if s.attempt.result.End == router.ClientDisconnected && s.events.background {
		a.beginFollowing(a.replicaResponseID(&stored, s.events.responseID), maxTokens)
	}
	return f
}

// readAndCommit reads the beginning of the stream into buffered, and commits the attempt unless it is a failure.
// It returns what it has reserved for buffered, for the caller to release.
func (s *streamRelay) readAndCommit(buffered *bytes.Buffer) (reserved int64, f *fault.Failure) {
	s.body.SetQuietTimeout(s.attempt.req.settings.Keepalive)
	chunk := s.attempt.req.proxy.pools.chunks.Get().(*[]byte)
	reserved, s.readErr = s.readUntilFirstEvent(buffered, *chunk)
	s.attempt.req.proxy.pools.chunks.Put(chunk)
	s.scanLastLine()
	if f := s.checkBeginning(); f != nil {
		return reserved, f
	}
	e := &s.events
	if s.flooded = s.readErr == nil && e.events == 0 && !e.done && e.errorEvent == nil; s.flooded {
		s.attempt.decision.Commit() // the time limit for the first event goes on
		return reserved, nil
	}
	s.body.AllowReuse()
	return reserved, s.attempt.commitAttempt()
}

// readUntilFirstEvent reads into buffered until the engine has output something, the stream has ended, or no more
// may be buffered. It returns what it has reserved for buffered.
func (s *streamRelay) readUntilFirstEvent(buffered *bytes.Buffer, chunk []byte) (reserved int64, err error) {
	e, commentedAt, withheldEvents := &s.events, time.Now(), 0
	if s.attempt.handover != nil {
		withheldEvents = 1
	}
	var relayAt time.Time
	for !e.content && !e.finished && !e.aborted && !e.done && e.errorEvent == nil && s.attempt.req.proxy.buffers.makeRoom(buffered, len(chunk), &reserved) {
		if e.events > withheldEvents {
			if relayAt.IsZero() {
				relayAt = time.Now().Add(roleEventDelay)
			}
			wait := max(time.Until(relayAt), time.Millisecond) // less might not see what has come
			if more, err := s.body.WaitReadable(wait); !more {
				return reserved, err
			}
		}
		n, err := s.body.Read(chunk)
		buffered.Write(e.scan(chunk[:n]))
		if err != nil && err != transport.ErrQuietTimeout {
			return reserved, err
		}
		if interval := s.attempt.req.settings.Keepalive; interval > 0 && time.Since(commentedAt) >= interval {
			if err := s.attempt.sendKeepAlive(s.resp); err != nil {
				return reserved, err
			}
			commentedAt = time.Now()
		}
	}
	return reserved, nil
}

// checkBeginning returns the failure that a stream is, as far as it was read, or nil. A client's own error is
// none: it would come from any backend.
func (s *streamRelay) checkBeginning() *fault.Failure {
	e := &s.events
	if f := s.attempt.checkResponseID(e.responseID); f != nil {
		return f
	}
	s.explainEnd()
	switch {
	case e.errorEvent != nil && s.attempt.quotesHandover(e.errorEventStatus(), e.errorEvent, true):
		return s.attempt.newQuoteFailure(e.errorEventStatus())
	case e.aborted:
		return s.attempt.recordReplicaAbort()
	case e.content || e.finished:
		return nil
	case e.errorEvent != nil:
		return s.checkErrorEvent()
	case e.done || s.readErr == nil || s.readErr == io.EOF && e.events > 0 && !s.isTruncated():
		return nil
	case s.readErr == io.EOF:
		return s.attempt.classifyOrEndRequest(fault.ErrTruncated)
	}
	return s.attempt.classifyOrEndRequest(s.readErr)
}

// explainEnd decides whether a response that has ended without a reason was aborted. It may block.
func (s *streamRelay) explainEnd() {
	e := &s.events
	if !e.unexplained {
		return
	}
	e.unexplained, e.aborted = false, s.attempt.awaitDown()
	e.finished = !e.aborted
}

// checkErrorEvent is checkBeginning for a stream that began with an error event. It means what a response with its status does.
func (s *streamRelay) checkErrorEvent() *fault.Failure {
	status, body := s.events.errorEventStatus(), s.events.errorEvent
	switch {
	case s.attempt.isRefusedAsTooLong(http.StatusBadRequest, body): // events of /v1/messages have no status
		return s.attempt.newTooLongFailure(fault.JSONHeader(), body)
	case s.isOfRequest(status, body):
		return nil
	}
	f := &fault.Failure{
		Reason: metrics.RetryErrorEvent, Err: errors.New("error event before any content"), Status: status, Header: fault.JSONHeader(),
	}
	f.SetMeaning(body)
	if s.attempt.req.endpoint.Format == api.ResponsesFormat { // its events have another form than its errors
		body = fault.Body(s.attempt.req.endpoint.Dialect(), fault.OfReplica(status, body))
	}
	f.KeepBody(s.attempt.req.proxy.buffers.reserve, s.attempt.req.endpoint.Dialect(), body)
	return f
}

// isOfRequest reports whether an error event says nothing about the replica: any would send it, or it is a part of the stored
// response that the client requests.
func (s *streamRelay) isOfRequest(status int, event []byte) bool {
	return s.attempt.req.endpoint.Format == api.StoredFormat || vllm.ClassifyError(status, event) == vllm.ErrorOfRequest
}

// sendBeginning sends the header and what came before the commit.
func (s *streamRelay) sendBeginning(buffered []byte) {
	if s.events.events > 0 {
		s.attempt.decision.RecordFirstEvent()
		s.releaseUploadedInput()
	}
	s.attempt.recordCommittedResponse(s.resp)
	s.attempt.ensureStreamHeader(s.resp)
	s.writeErr = s.out.writeBeginning(buffered)
	s.recordFirstToken()
	s.attempt.itl.observer = s.attempt.req.proxy.metrics.ITLHistogram(s.attempt.req.outcome.Model, s.attempt.req.outcome.Backend)
	if s.events.events > 0 {
		s.attempt.itl.observe(s.attempt.req.client.writeStartedAt)
	}
	s.body.SetIdleTimeout(s.attempt.req.settings.Idle)
}

// relayChunks relays the stream until it ends, is aborted by the engine, or cannot be written any more.
func (s *streamRelay) relayChunks() {
	e, quiet := &s.events, s.attempt.req.settings.Keepalive
	if quiet == 0 {
		quiet = noKeepalive
	}
	wait := quiet
	for s.readErr == nil && s.writeErr == nil {
		// A chunk is borrowed when there is something to read: most streams wait most of the time.
		var more bool
		if more, s.readErr = s.body.WaitReadable(wait); !more {
			wait = quiet
			if s.readErr == nil {
				s.writeErr = s.out.writeKeepAlive(keepAliveEvent(s.attempt.req.endpoint.Format))
			}
			continue
		}
		var n int
		n, s.readErr = s.body.Read(s.out.freeSpace())
		before := e.events
		n = len(e.scan(s.out.freeSpace()[:n]))
		if n == 0 && s.readErr == nil { // comments alone: the client's silence goes on
			s.out.releaseChunkIfEmpty()
			wait = max(quiet-time.Since(s.attempt.req.client.writeStartedAt), time.Millisecond)
			continue
		}
		wait = quiet
		if s.flooded && before == 0 && s.attempt.checkResponseID(e.responseID) != nil {
			s.readErr = errWrongResponse
			return
		}
		s.rememberResponse()
		switch {
		case e.events > 0 && before == 0 && s.flooded:
			_ = s.attempt.req.context.commit()
			s.body.AllowReuse()
			s.attempt.decision.RecordFirstEvent()
			s.releaseUploadedInput()
		case e.events > before: // a comment is the server's and no sign of its engine
			s.attempt.decision.RecordOutput()
		}
		s.explainEnd()
		if e.aborted {
			if s.writeErr = s.out.writeAllButLast(n, e.scannedBytes-e.abortOffset); s.writeErr == nil && s.readErr == nil {
				s.readUsageAfterAbort(s.out.freeSpace())
			}
			return
		}
		if at, found := s.findQuotedHandover(); found {
			s.withheld = true
			s.writeErr = s.out.writeAllButLast(n, e.scannedBytes-at)
			return
		}
		s.writeErr = s.out.writeCompleteLines(n)
		if e.events > before {
			s.attempt.itl.observe(s.attempt.req.client.writeStartedAt)
		}
		s.recordFirstToken()
	}
}

// findQuotedHandover returns the offset of an error event of a decode leg that may not be relayed, if there is one.
func (s *streamRelay) findQuotedHandover() (offset int64, found bool) {
	e := &s.events
	switch {
	case s.attempt.handover == nil:
		return 0, false
	case e.errorEvent != nil:
		return e.errorOffset, s.attempt.quotesHandover(e.errorEventStatus(), e.errorEvent, true)
	}
	return e.eventOffset, e.beginsLongError()
}

// readUsageAfterAbort reads what follows an abort for its usage. No client gets it.
func (s *streamRelay) readUsageAfterAbort(chunk []byte) {
	s.body.SetIdleTimeout(abortUsageTimeout)
	for end := time.Now().Add(abortUsageTimeout); !s.events.done && time.Now().Before(end); {
		n, err := s.body.Read(chunk)
		s.events.scan(chunk[:n])
		if err != nil && err != transport.ErrQuietTimeout {
			return
		}
	}
}

// releaseUploadedInput frees the request's body if the replica has all of it: a stream may last for minutes.
func (s *streamRelay) releaseUploadedInput() {
	if s.body.Uploaded() {
		s.attempt.req.releaseInput()
		s.attempt.req.history.handover.release(&s.attempt.req.proxy.buffers)
	}
}

// recordFirstToken notes the time of the first content, once.
func (s *streamRelay) recordFirstToken() {
	if s.events.content && s.attempt.req.outcome.TTFT == 0 {
		s.attempt.req.outcome.TTFT = time.Since(s.attempt.req.inFlight.Arrived)
		s.attempt.req.spans.AddFirstTokenSpan()
		if s.attempt.handover != nil {
			s.attempt.req.proxy.metrics.ObserveHandover(time.Since(s.attempt.handover.endedAt))
		}
	}
}

// finish ends a committed stream, with an error event if the client does not have all of it.
func (s *streamRelay) finish() {
	e := &s.events
	s.scanLastLine()
	s.explainEnd()
	s.attempt.recordUsage(&e.usage)
	s.attempt.result.OutputTokens = e.completionTokens()
	switch {
	case s.writeErr == nil && !e.aborted && !s.withheld && (e.done || s.readErr == io.EOF && !s.isTruncated()):
		s.out.flushPending()
		_ = s.pieces.writeUndecided()
		s.attempt.req.client.extendWriteDeadline()
		// Many clients close at [DONE], without waiting for the body's end.
		if e.errorEvent == nil {
			s.attempt.result.End = router.Completed
		} else if status := e.errorEventStatus(); !s.isOfRequest(status, e.errorEvent) {
			s.attempt.recordTruncated(status, errors.New("error event after content"))
		}
	case s.writeErr != nil || s.attempt.req.isDisconnected():
		s.attempt.recordDisconnect(s.attempt.req.client.abortPhase(metrics.AbortInStream))
	case s.attempt.req.isEndedByProxy():
		err := s.attempt.req.recordProxyEnd()
		s.attempt.result.End, s.attempt.req.outcome.Code = router.ClientDisconnected, err.Status
		s.sendErrorEvent(err)
	default:
		if e.aborted {
			s.attempt.decision.Backend.Aborted.Add(1)
		}
		err, cause := s.truncatedError()
		s.attempt.recordTruncated(err.Status, cause)
		s.sendErrorEvent(err)
	}
}

// scanLastLine reads a last line without a line end, unless it may be half a line.
func (s *streamRelay) scanLastLine() {
	if s.readErr == io.EOF && (httpheader.IsFramed(s.resp) || s.events.hasWholeLastLine()) {
		s.events.scanLastLine()
	}
}

// isTruncated reports whether a stream that ended without an error has no mark of its end: a finish_reason, an
// error or the format's last event. Where the end of the connection is that of the response, only the last counts.
// Extra paths may end their streams without any.
func (s *streamRelay) isTruncated() bool {
	e := &s.events
	return !e.done && !(httpheader.IsFramed(s.resp) && (e.finished || e.errorEvent != nil || s.attempt.req.endpoint.IsExtra))
}

// lineWriter writes a stream of server-sent events in whole lines, as soon as they are complete: half a line of
// a crashing replica would hide the error event that follows. A line that names an event is written with the next
// one, so that the event may still be withheld. A line longer than a chunk is written as it comes.
type lineWriter struct {
	to      io.Writer
	chunks  *sync.Pool // of *[]byte
	chunk   *[]byte    // borrowed from chunks; nil: none
	pending int        // bytes of chunk that are not written yet
	tail    [3]byte    // the last bytes written
}

func (l *lineWriter) borrowChunk() []byte {
	if l.chunk == nil {
		l.chunk = l.chunks.Get().(*[]byte)
	}
	return *l.chunk
}

// freeSpace returns the memory to read the next bytes of the stream to, before writeCompleteLines.
func (l *lineWriter) freeSpace() []byte { return l.borrowChunk()[l.pending:] }

// releaseChunkIfEmpty returns the chunk to the pool unless bytes of it are pending.
func (l *lineWriter) releaseChunkIfEmpty() {
	if l.pending == 0 {
		l.releaseChunk()
	}
}

func (l *lineWriter) releaseChunk() {
	if l.chunk != nil {
		l.chunks.Put(l.chunk)
		l.chunk = nil
	}
}

// writeCompleteLines writes the lines that are complete with the bytes that were read to freeSpace, and keeps the
// rest pending.
func (l *lineWriter) writeCompleteLines(added int) (err error) {
	defer l.releaseChunkIfEmpty()
	buf, have := l.borrowChunk(), l.pending+added
	whole := completeLinesLength(buf[:have])
	if whole == 0 && have == len(buf) {
		whole = have
	}
	if whole > 0 {
		err = l.writeAndKeepTail(buf[:whole])
	}
	l.pending = copy(buf, buf[whole:have])
	return err
}

// writeAllButLast writes what is pending and what was read to freeSpace, without the last withheld bytes, which
// begin with an event that the client is not to get. If its beginning was written before, the rest of it follows.
// Nothing stays pending.
func (l *lineWriter) writeAllButLast(added int, withheld int64) error {
	defer l.releaseChunkIfEmpty()
	have := l.pending + added
	l.pending = 0
	if withheld <= int64(have) {
		have -= int(withheld)
	}
	if have == 0 {
		return nil
	}
	return l.writeAndKeepTail(l.borrowChunk()[:have])
}

// completeLinesLength returns the length of the complete lines that b begins with, without a last one that names
// an event.
func completeLinesLength(b []byte) int {
	end := bytes.LastIndexAny(b, "\r\n") + 1
	if end == 0 {
		return 0
	}
	text := end - 1
	if text > 0 && b[text] == '\n' && b[text-1] == '\r' {
		text--
	}
	if last := bytes.LastIndexAny(b[:text], "\r\n") + 1; bytes.HasPrefix(b[last:], []byte("event:")) {
		return last
	}
	return end
}

// writeBeginning writes what came before the stream was committed.
func (l *lineWriter) writeBeginning(head []byte) error {
	defer l.releaseChunkIfEmpty()
	buf, whole := l.borrowChunk(), completeLinesLength(head)
	if len(head)-whole >= len(buf) {
		whole = len(head)
	}
	l.pending = copy(buf, head[whole:])
	return l.writeAndKeepTail(head[:whole])
}

// flushPending writes what is pending at the end of the stream.
func (l *lineWriter) flushPending() {
	if l.pending > 0 {
		l.writeAndKeepTail(l.borrowChunk()[:l.pending])
	}
}

// writeAndKeepTail writes b, and keeps its end for writeKeepAlive.
func (l *lineWriter) writeAndKeepTail(b []byte) error {
	n := min(len(b), len(l.tail))
	copy(l.tail[:], l.tail[n:])
	copy(l.tail[len(l.tail)-n:], b[len(b)-n:])
	_, err := l.to.Write(b)
	return err
}

// missingLineEnds returns the line ends that the last event written lacks.
func (l *lineWriter) missingLineEnds() string {
	switch tail := string(l.tail[:]); {
	case l.tail == [3]byte{}, strings.HasSuffix(tail, "\n\n"), strings.HasSuffix(tail, "\r\r"), strings.HasSuffix(tail, "\n\r"), tail == "\n\r\n", tail == "\r\r\n":
		return ""
	case tail[2] == '\n':
		return "\n"
	}
	return "\n\n"
}

// chunkIntervals observes the time between the chunks of a stream that carry events, by when each was written:
// reading the clock once more would cost more than the rest.
type chunkIntervals struct {
	observer prometheus.Observer
	last     time.Time // zero: there was none yet
}

func (g *chunkIntervals) observe(at time.Time) {
	if !g.last.IsZero() {
		g.observer.Observe(at.Sub(g.last).Seconds())
	}
	g.last = at
}

// truncatedError returns the error for a stream that the replica did not complete, and its
// cause.
func (s *streamRelay) truncatedError() (apiErr *fault.Error, cause error) {
	e := fault.New(http.StatusBadGateway, fault.CodeReplicaFailed, "the replica closed the response early")
	switch {
	case s.withheld:
		e.Message = "the replica failed; its error is withheld, as it names the address of a KV transfer"
		return e, errQuotesHandover
	case s.events.aborted:
		e.Code, e.Message = fault.CodeReplicaAborted, "the replica aborted the request, so the response is incomplete"
		return e, fault.ErrAborted
	case errors.Is(s.readErr, fault.ErrFirstByte):
		return fault.FirstByteTimeout(), s.readErr
	case errors.Is(s.readErr, os.ErrDeadlineExceeded):
		return fault.New(http.StatusGatewayTimeout, fault.CodeIdleTimeout, "the replica stopped sending (timeouts.idle)"), s.readErr
	case fault.IsRemoval(s.readErr):
		e.Message = "the replica was removed before the response was complete (timeouts.shutdown)"
	}
	if s.readErr == io.EOF {
		return e, fault.ErrTruncated
	}
	return e, s.readErr
}

// sendErrorEvent ends the stream with an error, after the line ends that the last event lacks.
func (s *streamRelay) sendErrorEvent(e *fault.Error) {
	s.attempt.req.client.Write(append([]byte(s.out.missingLineEnds()), fault.Event(s.attempt.req.endpoint.Format, e, s.events.nextSequence)...))
}
