package metrics

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"warmroute/backends"
	"warmroute/recovery"
)

type eventMetrics struct {
	retries           *prometheus.CounterVec
	retryWaits        *prometheus.CounterVec
	disconnects       *prometheus.CounterVec
	cancels           prometheus.Counter
	queueTime         prometheus.Histogram
	queueExits        *prometheus.CounterVec
	responseLookups   *prometheus.CounterVec
	unauthorized      *prometheus.CounterVec
	registrations     *prometheus.CounterVec
	pollErrors        *prometheus.CounterVec
	closedConnections prometheus.Counter
	droppedRequests   prometheus.Counter
	panics            *prometheus.CounterVec
	splits            *prometheus.CounterVec
	prefillRequest    prometheus.Histogram
	kvTransfer        prometheus.Histogram
}

// newEventMetrics returns the counters with all labels that are known in advance at
// zero, so that the first event is visible in a rate.
func newEventMetrics(register promauto.Factory) *eventMetrics {
	e := &eventMetrics{
		retries: newCounterVec(register, "retries_total",
			"Attempts that failed before anything was sent to the client and were repeated. stale_connection: a reused one that the replica had "+
				"closed; truncated: the response ended early; invalid_response: it is not HTTP/1, or its header is too long; loop: another proxy "+
				"had seen the request; rank, scaling: the replica has other engines than before; context_length: the replica refused the request as "+
				"too long, and another one accepts longer ones; wrong_response: to another request.", "reason"),
		retryWaits: newCounterVec(register, "retry_waits_total", "Requests that waited for the retry budget (retry.share), by result.",
			"result"),
		disconnects: newCounterVec(register, "disconnected_requests_total",
			"Requests whose client disconnected or stopped reading, by what the request was doing.", "phase"),
		cancels: register.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_cancelled_requests_total",
			Help: "Requests that an operator cancelled.",
		}),
		queueTime: register.NewHistogram(histogramOpts("queue_seconds", "Time in the admission queue, of requests that were queued.",
			1.0/(1<<13), .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)),
		queueExits: newCounterVec(register, "queue_ends_total",
			"Requests that left the admission queue or found it full. busy: no backend had room within routing.queue.busy_timeout; none_ready: "+
				"none was ready and made progress within routing.queue.none_ready_timeout; late: none was predicted to meet the "+
				"request's target (slo.refuse).",
			"result"),
		responseLookups: newCounterVec(register, "response_lookups_total",
			"Requests that refer to a stored response (previous_response_id, or its id in the path). known: its replica was known; found: by "+
				"asking the replicas; lost: its replica was restarted or removed.", "result"),
		unauthorized: newCounterVec(register, "unauthorized_total",
			"Requests refused because of their API key, by reason: missing, unknown, expired.", "reason"),
		registrations: newCounterVec(register, "registration_calls_total",
			"Calls that add or remove a replica over the public listener, and refused ones, by result.", "result"),
		pollErrors: newCounterVec(register, "poll_errors_total", "Failed polls of a backend's /metrics.", "backend"),
		panics: newCounterVec(register, "panics_total",
			"Panics that were recovered, by place. Each is a bug of warmroute; the log has its stack.", "where"),
		splits: newCounterVec(register, "split_requests_total",
			"Requests in a fleet with replicas for prefill or decode, by whether one did the prefill and another one the decode: split, or why "+
				"not. cheaper: one replica alone; full: the replicas for prefill have no room; late: the KV transfer would have taken, or took, too "+
				"much of disaggregation.kv_lease; prefill_failed, decode_failed: then one replica did both.", "result"),
		prefillRequest: register.NewHistogram(histogramOpts("prefill_request_seconds", "Time from the request for the prefill of a split "+
			"request to its response.",
			1.0/(1<<10), .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80)),
		kvTransfer: register.NewHistogram(histogramOpts("kv_transfer_seconds", "Time from the response to the prefill of a split request to "+
			"the first content of its stream.",
			1.0/(1<<10), .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20)),
		closedConnections: register.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_connections_closed_total",
			Help: "Idle client connections closed to make room for new ones (limits.connections, or fewer if file descriptors are scarce).",
		}),
		droppedRequests: register.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_recording_dropped_requests_total",
			Help: "Requests dropped from the recording (recording.memory, recording.file): the queue was full, the request was too large to " +
				"replay, it ended after shutdown, or writing failed.",
		}),
	}
	initLabels(e.panics, recovery.Places()...)
	initLabels(e.splits, SplitDone, SplitCheaper, SplitForbidden, SplitNoPrefill, SplitFull, SplitNoDecode, SplitLate, SplitPrefillFailed,
		SplitDecodeFailed)
	initLabels(e.retryWaits, RetryWaitSent, RetryWaitGivenUp, RetryWaitDisconnected)
	initLabels(e.queueExits, QueueSent, QueueFull, QueueBusy, QueueLate, QueueNoneReady, QueueDisconnected)
	initLabels(e.responseLookups, ResponseKnown, ResponseFound, ResponseUnknown, ResponseOfOtherKey, ResponseLost)
	initLabels(e.unauthorized, KeyMissing, KeyUnknown, KeyExpired)
	initLabels(e.registrations, RegistrationOK, RegistrationNotReady, RegistrationInvalid, RegistrationRefusedToken,
		RegistrationRefusedAddress, RegistrationRefusedOrigin, RegistrationRefusedURL)
	initLabels(e.disconnects, DisconnectInUpload, DisconnectInQueue, DisconnectBeforeResponse, DisconnectInStream, DisconnectInBody,
		DisconnectNotReading)
	initLabels(e.retries, RetryConnect, RetryStale, RetryFirstByte, RetryResponse, RetryStalled, RetryTruncated, RetryErrorEvent, RetryAborted,
		RetryRedirect, RetryInvalid, RetryDescriptors, RetryLoop, RetryEncoded, RetryEndpoint, RetryContextLength, RetryRank, RetryScaling,
		RetryWrongResponse, RetryNoTransferParams, RetryKVTransfer,
		RetryStatus(429), RetryStatus(500), RetryStatus(502), RetryStatus(503), RetryStatus(504))
	return e
}

func initLabels[T ~string](c *prometheus.CounterVec, values ...T) {
	for _, value := range values {
		c.WithLabelValues(string(value))
	}
}

// RetryReason is why an attempt failed before anything was sent to the client.
type RetryReason string

// Reasons of retries. RetryStatus returns those of response statuses.
const (
	RetryConnect     RetryReason = "connect"          // connection failed
	RetryStale       RetryReason = "stale_connection" // kept-alive connection closed by the replica
	RetryFirstByte   RetryReason = "first_byte_timeout"
	RetryResponse    RetryReason = "response_timeout"
	RetryStalled     RetryReason = "stalled"
	RetryTruncated   RetryReason = "truncated"
	RetryErrorEvent  RetryReason = "error_event" // first event of the stream
	RetryAborted     RetryReason = "aborted"     // by the engine
	RetryRedirect    RetryReason = "redirect"
	RetryInvalid     RetryReason = "invalid_response"   // no valid HTTP/1, or a header that is too long
	RetryDescriptors RetryReason = "out_of_descriptors" // in this process
	RetryLoop        RetryReason = "loop"               // another proxy reported that the request had passed it before
	RetryEncoded     RetryReason = "encoded"
	RetryEndpoint    RetryReason = "endpoint_missing" // the replica does not serve the path
	RetryRank        RetryReason = "rank"             // the replica does not have the data-parallel rank
	// RetryContextLength: the replica refused the request as too long, and another one accepts longer ones.
	RetryContextLength RetryReason = "context_length"

	RetryScaling       RetryReason = "scaling"        // the replica is changing the number of its engines
	RetryWrongResponse RetryReason = "wrong_response" // to another request, on a kept-alive connection

	RetryNoTransferParams RetryReason = "no_transfer_params" // the prefill of a split request was done, but not for another replica
	RetryKVTransfer       RetryReason = "kv_transfer"        // the decode of a split request could not be sent in time
)

// RetryStatus returns the reason of a response with that status.
func RetryStatus(code int) RetryReason { return RetryReason("status_" + strconv.Itoa(code)) }

// CountRetry counts an attempt that failed and could be repeated.
func (m *Metrics) CountRetry(reason RetryReason) { countLabel(m.events.retries, reason) }

// SplitResult is whether one replica did the prefill of a request and another one its decode, or why not.
type SplitResult string

// Results of a fleet with replicas for prefill or decode.
const (
	SplitDone          SplitResult = "split"
	SplitCheaper       SplitResult = "cheaper"      // one replica alone
	SplitForbidden     SplitResult = "unsplittable" // by what the request asks for
	SplitNoPrefill     SplitResult = "no_prefill"   // no replica for it is ready
	SplitFull          SplitResult = "full"         // those for it have no room
	SplitNoDecode      SplitResult = "no_decode"    // no replica for it is ready
	SplitLate          SplitResult = "late"         // the lease of the KV cache might have ended
	SplitPrefillFailed SplitResult = "prefill_failed"
	SplitDecodeFailed  SplitResult = "decode_failed"
)

// CountSplit counts a request of a fleet with replicas for prefill or decode; with an empty result it does nothing.
func (m *Metrics) CountSplit(result SplitResult) {
	if result != "" {
		countLabel(m.events.splits, result)
	}
}

// ObservePrefillRequest records how long the prefill of a split request took.
func (m *Metrics) ObservePrefillRequest(took time.Duration) {
	m.events.prefillRequest.Observe(took.Seconds())
}

// ObserveKVTransfer records the time from the response to a prefill request to the first content of the stream.
func (m *Metrics) ObserveKVTransfer(took time.Duration) { m.events.kvTransfer.Observe(took.Seconds()) }

// RetryWaitResult is how a wait for the retry budget ended.
type RetryWaitResult string

// Results of waits for the retry budget.
const (
	RetryWaitSent         RetryWaitResult = "sent"
	RetryWaitGivenUp      RetryWaitResult = "given_up"     // no budget in time
	RetryWaitDisconnected RetryWaitResult = "disconnected" // client disconnect
)

// CountRetryWait counts a request that waited for the retry budget.
func (m *Metrics) CountRetryWait(result RetryWaitResult) { countLabel(m.events.retryWaits, result) }

// DisconnectPhase is what a request was doing when its client disconnected.
type DisconnectPhase string

// Phases of requests whose client disconnected.
const (
	DisconnectInUpload       DisconnectPhase = "in_upload"
	DisconnectInQueue        DisconnectPhase = "queued"
	DisconnectBeforeResponse DisconnectPhase = "before_response"
	DisconnectInStream       DisconnectPhase = "in_stream"
	DisconnectInBody         DisconnectPhase = "in_body"
	DisconnectNotReading     DisconnectPhase = "not_reading" // the client is connected but does not read
)

// CountDisconnect counts a request whose client disconnected or was disconnected.
func (m *Metrics) CountDisconnect(phase DisconnectPhase) { countLabel(m.events.disconnects, phase) }

// CountCancel counts a request that an operator cancelled.
func (m *Metrics) CountCancel() { m.events.cancels.Inc() }

// QueueResult is how a request left the admission queue.
type QueueResult string

// Results of the admission queue.
const (
	QueueSent         QueueResult = "sent"
	QueueFull         QueueResult = "full"         // not queued
	QueueBusy         QueueResult = "busy"         // no backend had room in time
	QueueLate         QueueResult = "late"         // refused: no backend was predicted to meet its target for the TTFT
	QueueNoneReady    QueueResult = "none_ready"   // no backend was ready in time
	QueueDisconnected QueueResult = "disconnected" // client disconnect
)

// RecordQueueExit records a request that left the admission queue after wait, or found it full.
func (m *Metrics) RecordQueueExit(result QueueResult, wait time.Duration) {
	countLabel(m.events.queueExits, result)
	if result != QueueFull {
		m.events.queueTime.Observe(max(wait, 0).Seconds())
	}
}

// ResponseLookup is what became of a request that refers to a stored response.
type ResponseLookup string

// Results of look-ups of stored responses.
const (
	ResponseKnown      ResponseLookup = "known"     // its replica was known
	ResponseFound      ResponseLookup = "found"     // the replicas were asked, and one has it
	ResponseUnknown    ResponseLookup = "unknown"   // no replica is known to have it
	ResponseOfOtherKey ResponseLookup = "other_key" // it belongs to another API key
	ResponseLost       ResponseLookup = "lost"      // its replica was known, and does not have it any more
)

// CountResponseLookup counts a request that refers to a stored response. One whose
// response is lost counts as known before.
func (m *Metrics) CountResponseLookup(result ResponseLookup) {
	countLabel(m.events.responseLookups, result)
}

// UnauthorizedReason is why a request was refused because of its API key.
type UnauthorizedReason string

// Reasons of refusals.
const (
	KeyMissing UnauthorizedReason = "missing"
	KeyUnknown UnauthorizedReason = "unknown"
	KeyExpired UnauthorizedReason = "expired"
)

// CountUnauthorized counts a request without a valid API key.
func (m *Metrics) CountUnauthorized(reason UnauthorizedReason) {
	countLabel(m.events.unauthorized, reason)
}

// RegistrationResult is how a call ended that adds or removes a replica over the public listener.
type RegistrationResult string

// Results of registration calls.
const (
	RegistrationOK             RegistrationResult = "ok"
	RegistrationNotReady       RegistrationResult = "not_ready" // added, but not ready in time
	RegistrationInvalid        RegistrationResult = "invalid"
	RegistrationRefusedToken   RegistrationResult = "refused_token"
	RegistrationRefusedAddress RegistrationResult = "refused_address" // of the caller
	RegistrationRefusedOrigin  RegistrationResult = "refused_origin"  // sent by a web page
	RegistrationRefusedURL     RegistrationResult = "refused_url"     // of the replica
)

// CountRegistration counts a call that adds or removes a replica, and any that was refused.
func (m *Metrics) CountRegistration(result RegistrationResult) {
	countLabel(m.events.registrations, result)
}

// CountPollError counts a failed poll of the backend.
func (m *Metrics) CountPollError(b *backends.Backend) { countLabel(m.events.pollErrors, b.Name) }

// CountEvictedConnection counts a client connection closed to make room for another.
func (m *Metrics) CountEvictedConnection() { m.events.closedConnections.Inc() }

// CountDroppedRequest counts a request that was dropped from the recording.
func (m *Metrics) CountDroppedRequest() { m.events.droppedRequests.Inc() }

// CountPanic counts a recovered panic.
func (m *Metrics) CountPanic(place recovery.Place) { countLabel(m.events.panics, place) }

func countLabel[T ~string](c *prometheus.CounterVec, label T) { c.WithLabelValues(string(label)).Inc() }
