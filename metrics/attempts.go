package metrics

import "strconv"

// RetryReason is why an attempt failed before the client saw anything of it.
type RetryReason string

// An answer's own status is one as well: RetryStatus.
const (
	RetryConnect     RetryReason = "connect"          // no connection to the replica
	RetryStale       RetryReason = "stale_connection" // a kept-alive one, which the replica had closed
	RetryFirstByte   RetryReason = "first_byte_timeout"
	RetryResponse    RetryReason = "response_timeout"
	RetryStuck       RetryReason = "stuck"       // the replica does nothing
	RetryBroken      RetryReason = "broken"      // the answer broke off, or was none
	RetryErrorEvent  RetryReason = "error_event" // a stream's first
	RetryAborted     RetryReason = "aborted"     // by the engine
	RetryRedirect    RetryReason = "redirect"
	RetryDescriptors RetryReason = "out_of_descriptors" // of this process
	RetryLoop        RetryReason = "loop"               // another proxy answered that the request had passed it
	RetryEncoded     RetryReason = "encoded"
)

// RetryStatus is the reason of an answer with that status.
func RetryStatus(code int) RetryReason { return RetryReason("status_" + strconv.Itoa(code)) }

// Retried records an attempt that failed and could be made elsewhere.
func (m *Metrics) Retried(reason RetryReason) { m.retries.WithLabelValues(string(reason)).Inc() }

// AbortPhase is what a request was doing when its client was lost.
type AbortPhase string

const (
	AbortInUpload     AbortPhase = "in_upload"
	AbortHeld         AbortPhase = "held"
	AbortBeforeAnswer AbortPhase = "before_answer"
	AbortInStream     AbortPhase = "in_stream"
	AbortInBody       AbortPhase = "in_body"
	AbortNotReading   AbortPhase = "not_reading" // it is there, and takes nothing
	AbortCancelled    AbortPhase = "cancelled"   // by an operator, wherever it was
)

// Aborted records a client that left, or was cut off.
func (m *Metrics) Aborted(phase AbortPhase) { m.aborts.WithLabelValues(string(phase)).Inc() }
