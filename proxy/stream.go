package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

const (
	// roleEventDelay is how long events without content are buffered for what follows: an engine that is
	// shutting down sends the role, and directly after it an abort. Then another backend is asked.
	roleEventDelay = 25 * time.Millisecond
	noKeepalive    = 1000 * time.Hour
	// abortUsageTimeout bounds the wait for the usage after an abort. vLLM sends it at once.
	abortUsageTimeout = 2 * time.Second
)

// streamRelay relays a response of server-sent events. Nothing of it, not even its status, goes to the client
// before the engine has output something: vLLM sends its 200 before it has begun, and of a decode request also the first
// event, which has only the role, before an error.
type streamRelay struct {
	attempt  *attempt
	resp     *http.Response
	body     relay.Body
	events   relay.Scanner
	out      relay.LineWriter
	pieces   relay.PieceWriter // where out writes
	unsaved  *stored.Input     // of a response that is not remembered yet; nil: it is, or is not to be
	withheld bool              // the replica's error event, as it may name the address of the KV transfer
	flooded  bool              // committed without an event, behind more than may be buffered
	readErr  error             // why there is no more to read
	writeErr error             // why nothing can be written any more
}

// relayStream returns nil when the stream was committed to the client, whatever its end.
func (a *attempt) relayStream(resp *http.Response, body relay.Body) *fault.Failure {
	a.startReplyHashing()
	s := &streamRelay{attempt: a, resp: resp, body: body, events: relay.NewScanner(a.req.endpoint.Format, a.reply)}
	s.events.Metadata = a.metadata
	stored, maxTokens := a.req.input.stored, a.req.input.request.MaxOutputTokens // input may be released before the end of the stream
	if a.req.endpoint.Format == api.ResponsesFormat && !a.req.input.stored.Unstored {
		s.unsaved = &stored
	}
	s.pieces = relay.NewPieceWriter(&a.req.client, a.req.settings.allowsTransferParams(), true)
	s.out = relay.NewLineWriter(&s.pieces, &a.req.proxy.pools.chunks)
	defer s.out.ReleaseChunk()
	buffered := a.req.proxy.buffers.Get()
	reserved, f := s.readAndCommit(buffered)
	if f == nil {
		s.rememberResponse()
		s.sendBeginning(buffered.Bytes())
	} else if f.Done {
		s.attempt.setStreamedTokens(&s.events)
	}
	a.req.proxy.buffers.Put(buffered)
	a.req.proxy.buffers.Release(reserved)
	if f == nil {
		s.relayChunks()
		s.finish()
	}
	if s.attempt.result.End == router.ClientDisconnected && s.events.Background && !s.attempt.released {
		a.beginFollowing(a.replicaResponseID(&stored, s.events.ResponseID), maxTokens)
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
	if s.flooded = s.readErr == nil && e.Events == 0 && !e.Done && e.ErrorEvent == nil; s.flooded {
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
	if s.attempt.kvTransfer != nil {
		withheldEvents = 1
	}
	var relayAt time.Time
	for !e.Content && !e.Finished && !e.Aborted && !e.Done && e.ErrorEvent == nil && s.attempt.req.proxy.buffers.MakeRoom(buffered, len(chunk),
		&reserved) {
		if e.Events > withheldEvents {
			if relayAt.IsZero() {
				relayAt = time.Now().Add(roleEventDelay)
			}
			wait := max(time.Until(relayAt), time.Millisecond) // less might not see what has come
			if more, err := s.body.WaitReadable(wait); !more {
				return reserved, err
			}
		}
		n, err := s.body.Read(chunk)
		buffered.Write(e.Scan(chunk[:n]))
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
	if f := s.attempt.checkResponseID(e.ResponseID); f != nil {
		return f
	}
	s.explainEnd()
	switch {
	case e.ErrorEvent != nil && s.attempt.quotesKVTransfer(e.ErrorStatus(), e.ErrorEvent, true):
		return s.attempt.newQuoteFailure(e.ErrorStatus())
	case e.Aborted:
		return s.attempt.recordReplicaAbort()
	case e.Content || e.Finished:
		return nil
	case e.ErrorEvent != nil:
		return s.checkErrorEvent()
	case e.Done || s.readErr == nil || s.readErr == io.EOF && e.Events > 0 && !s.isTruncated():
		return nil
	case s.readErr == io.EOF:
		return s.attempt.classifyOrEndRequest(fault.ErrTruncated)
	}
	return s.attempt.classifyOrEndRequest(s.readErr)
}

// explainEnd decides whether a response that has ended without a reason was aborted. It may block.
func (s *streamRelay) explainEnd() {
	e := &s.events
	if !e.Unexplained {
		return
	}
	e.Unexplained, e.Aborted = false, s.attempt.awaitDown()
	e.Finished = !e.Aborted
}

// checkErrorEvent is checkBeginning for a stream that began with an error event. It means what a response with its status does.
func (s *streamRelay) checkErrorEvent() *fault.Failure {
	status, body := s.events.ErrorStatus(), s.events.ErrorEvent
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
		body = fault.Body(s.attempt.req.endpoint.Dialect(), fault.ReplicaError(status, body))
	}
	f.KeepBody(s.attempt.req.proxy.buffers.Reserve, s.attempt.req.endpoint.Dialect(), body)
	return f
}

// isOfRequest reports whether an error event says nothing about the replica: any would send it, or it is a part of the stored
// response that the client requests.
func (s *streamRelay) isOfRequest(status int, event []byte) bool {
	return s.attempt.req.endpoint.Format == api.StoredFormat || vllm.ClassifyError(status, event) == vllm.ErrorOfRequest
}

// sendBeginning sends the header and what came before the commit.
func (s *streamRelay) sendBeginning(buffered []byte) {
	if s.events.Events > 0 {
		s.attempt.decision.RecordFirstEvent()
		s.releaseUploadedInput()
	}
	s.attempt.recordCommittedResponse(s.resp)
	s.attempt.ensureStreamHeader(s.resp)
	s.releaseDecisionIfComplete()
	s.writeErr = s.out.WriteBeginning(buffered)
	s.recordFirstToken()
	s.attempt.itl.Observer = s.attempt.req.proxy.metrics.ITLHistogram(s.attempt.req.outcome.Model, s.attempt.req.outcome.Backend)
	if s.events.Events > 0 {
		s.attempt.itl.Observe(s.attempt.req.client.WriteStartedAt)
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
				s.writeErr = s.out.WriteKeepAlive(relay.KeepAliveEvent(s.attempt.req.endpoint.Format))
			}
			continue
		}
		var n int
		n, s.readErr = s.body.Read(s.out.FreeSpace())
		before := e.Events
		n = len(e.Scan(s.out.FreeSpace()[:n]))
		if n == 0 && s.readErr == nil { // comments alone: the client's silence goes on
			s.out.ReleaseChunkIfEmpty()
			wait = max(quiet-time.Since(s.attempt.req.client.WriteStartedAt), time.Millisecond)
			continue
		}
		wait = quiet
		if s.flooded && before == 0 && s.attempt.checkResponseID(e.ResponseID) != nil {
			s.readErr = upstream.ErrWrongResponse
			return
		}
		s.rememberResponse()
		switch {
		case e.Events > 0 && before == 0 && s.flooded:
			_ = s.attempt.req.context.Commit()
			s.body.AllowReuse()
			s.attempt.decision.RecordFirstEvent()
			s.releaseUploadedInput()
		case e.Events > before && !s.attempt.released: // a comment is the server's and no sign of its engine
			s.attempt.decision.RecordOutput()
		}
		s.explainEnd()
		if e.Aborted {
			if s.writeErr = s.out.WriteAllButLast(n, e.ScannedBytes-e.AbortOffset); s.writeErr == nil && s.readErr == nil {
				s.readUsageAfterAbort(s.out.FreeSpace())
			}
			return
		}
		if at, found := s.findQuotedKVTransfer(); found {
			s.withheld = true
			s.writeErr = s.out.WriteAllButLast(n, e.ScannedBytes-at)
			return
		}
		s.releaseDecisionIfComplete()
		s.writeErr = s.out.WriteCompleteLines(n)
		if e.Events > before {
			s.attempt.itl.Observe(s.attempt.req.client.WriteStartedAt)
		}
		s.recordFirstToken()
	}
}

// releaseDecisionIfComplete records the attempt as completed and releases its decision, if the format's last event was read
// and there was no error event. It does so once.
func (s *streamRelay) releaseDecisionIfComplete() {
	if e := &s.events; !e.Done || e.ErrorEvent != nil || s.attempt.released {
		return
	}
	s.recordFirstToken() // before the attempt's span ends
	s.recordTokens()
	s.attempt.result.End = router.Completed
	s.attempt.recordAndReleaseDecision()
	s.events.ForgetReply()
}

// recordTokens records the usage and the number of output tokens, as far as the stream was read.
func (s *streamRelay) recordTokens() {
	s.attempt.recordUsage(&s.events.Usage)
	s.attempt.setStreamedTokens(&s.events)
}

// findQuotedKVTransfer returns the offset of an error event of a decode request that may not be relayed, if there is one.
func (s *streamRelay) findQuotedKVTransfer() (offset int64, found bool) {
	e := &s.events
	switch {
	case s.attempt.kvTransfer == nil:
		return 0, false
	case e.ErrorEvent != nil:
		return e.ErrorOffset, s.attempt.quotesKVTransfer(e.ErrorStatus(), e.ErrorEvent, true)
	}
	return e.EventOffset, e.BeginsLongError()
}

// readUsageAfterAbort reads what follows an abort for its usage. No client gets it.
func (s *streamRelay) readUsageAfterAbort(chunk []byte) {
	s.body.SetIdleTimeout(abortUsageTimeout)
	for end := time.Now().Add(abortUsageTimeout); !s.events.Done && time.Now().Before(end); {
		n, err := s.body.Read(chunk)
		s.events.Scan(chunk[:n])
		if err != nil && err != transport.ErrQuietTimeout {
			return
		}
	}
}

// releaseUploadedInput frees the request's body if the replica has all of it: a stream may last for minutes.
func (s *streamRelay) releaseUploadedInput() {
	if s.body.Uploaded() {
		s.attempt.req.releaseInput()
		s.attempt.req.history.kvTransfer.Release(&s.attempt.req.proxy.buffers)
	}
}

// recordFirstToken notes the time of the first content, once.
func (s *streamRelay) recordFirstToken() {
	if s.events.Content && s.attempt.req.outcome.TTFT == 0 {
		s.attempt.req.outcome.TTFT = time.Since(s.attempt.req.inFlight.Arrived)
		s.attempt.req.spans.AddFirstTokenSpan()
		if s.attempt.kvTransfer != nil {
			s.attempt.req.proxy.metrics.ObserveKVTransfer(time.Since(s.attempt.kvTransfer.EndedAt))
		}
	}
}

// finish ends a committed stream, with an error event if the client does not have all of it.
func (s *streamRelay) finish() {
	e := &s.events
	s.scanLastLine()
	s.explainEnd()
	if !s.attempt.released {
		s.recordTokens()
	}
	switch {
	case s.writeErr == nil && !e.Aborted && !s.withheld && (e.Done || s.readErr == io.EOF && !s.isTruncated()):
		s.out.FlushPending()
		_ = s.pieces.WriteUndecided()
		s.attempt.req.client.ExtendWriteDeadline()
		// Many clients close at [DONE], without waiting for the body's end.
		if e.ErrorEvent == nil {
			s.attempt.result.End = router.Completed
		} else if status := e.ErrorStatus(); !s.isOfRequest(status, e.ErrorEvent) {
			s.attempt.recordTruncated(status, errors.New("error event after content"))
		}
	case s.writeErr != nil || s.attempt.req.lifetime.isDisconnected():
		s.attempt.recordDisconnect(s.attempt.req.client.DisconnectPhase(metrics.DisconnectInStream))
	case s.attempt.req.lifetime.isEndedByProxy():
		err := s.attempt.req.recordProxyEnd()
		s.attempt.result.End, s.attempt.req.outcome.Code = router.ClientDisconnected, err.Status
		s.sendErrorEvent(err)
	default:
		if e.Aborted {
			s.attempt.decision.Backend.Aborted.Add(1)
		}
		err, cause := s.truncatedError()
		s.attempt.recordTruncated(err.Status, cause)
		s.sendErrorEvent(err)
	}
}

// scanLastLine reads a last line without a line end, unless it may be half a line.
func (s *streamRelay) scanLastLine() {
	if s.readErr == io.EOF && (httpheader.IsFramed(s.resp) || s.events.HasWholeLastLine()) {
		s.events.ScanLastLine()
	}
}

// isTruncated reports whether a stream that ended without an error has no mark of its end: a finish_reason, an
// error or the format's last event. Where the end of the connection is that of the response, only the last counts.
// Extra paths may end their streams without any.
func (s *streamRelay) isTruncated() bool {
	e := &s.events
	return !e.Done && !(httpheader.IsFramed(s.resp) && (e.Finished || e.ErrorEvent != nil || s.attempt.req.endpoint.IsExtra))
}

// truncatedError returns the error for a stream that the replica did not complete, and its
// cause.
func (s *streamRelay) truncatedError() (apiErr *fault.Error, cause error) {
	e := fault.New(http.StatusBadGateway, fault.CodeReplicaFailed, "the replica closed the response early")
	switch {
	case s.withheld:
		e.Message = "the replica failed; its error is withheld, as it names the address of a KV transfer"
		return e, upstream.ErrQuotesTransfer
	case s.events.Aborted:
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
	s.attempt.req.client.Write(append([]byte(s.out.MissingLineEnds()), fault.Event(s.attempt.req.endpoint.Format, e,
		s.events.NextSequence)...))
}
