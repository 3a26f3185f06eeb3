package metrics

// RetryEnd is how the wait for the retry budget ended.
type RetryEnd string

const (
	RetrySent    RetryEnd = "sent"
	RetryGivenUp RetryEnd = "given_up" // the budget had no room in time
	RetryLeft    RetryEnd = "left"     // the client left
)

// RetryWaited records a request that had to wait for the retry budget.
func (m *Metrics) RetryWaited(end RetryEnd) { m.retryWaits.WithLabelValues(string(end)).Inc() }
