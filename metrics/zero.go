package metrics

import "github.com/prometheus/client_golang/prometheus"

// zero makes the series whose labels are known, so that a rate is there before the
// first event, and the first event is in it.
func (m *Metrics) zero() {
	for counter, values := range map[*prometheus.CounterVec][]string{
		m.retryWaits:   {string(RetrySent), string(RetryGivenUp), string(RetryLeft)},
		m.holdEnds:     {string(HeldSent), string(HeldRefused), string(HeldTooLong), string(HeldNoneReady), string(HeldLeft)},
		m.unauthorized: {string(NoKey), string(UnknownKey), string(ExpiredKey)},
		m.aborts: {string(AbortInUpload), string(AbortHeld), string(AbortBeforeAnswer), string(AbortInStream), string(AbortInBody),
			string(AbortNotReading), string(AbortCancelled)},
		m.retries: {string(RetryConnect), string(RetryFirstByte), string(RetryResponse), string(RetryStuck), string(RetryBroken), string(RetryErrorEvent),
			string(RetryAborted), string(RetryStale), string(RetryLoop), string(RetryDescriptors), string(RetryRedirect), string(RetryEncoded),
			string(RetryStatus(500)), string(RetryStatus(502)), string(RetryStatus(503)), string(RetryStatus(504))},
	} {
		for _, value := range values {
			counter.WithLabelValues(value)
		}
	}
}

// zeroPolls does it for the backends that there are.
func (m *Metrics) zeroPolls() {
	for _, b := range shown(m.fleet) {
		m.polls.WithLabelValues(b.Name)
		if m.fleet.Find(b.Name) == nil {
			m.Forget(b.Name) // it left meanwhile
		}
	}
}
