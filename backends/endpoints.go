package backends

import (
	"sync/atomic"
	"time"
)

// Endpoint is the number of an API path, below MaxEndpoints. The proxy assigns them.
type Endpoint uint8

// MaxEndpoints bounds the endpoints that a Backend remembers to be missing.
const MaxEndpoints = 32

// missingEndpointLifetime is for how long an endpoint counts as missing: a replica that
// was replaced unnoticed may serve it.
const missingEndpointLifetime = time.Minute

// missingEndpoints are the endpoints that a replica does not serve, as it answered.
// Safe for concurrent use; the zero value is empty.
type missingEndpoints struct {
	expiry [MaxEndpoints]atomic.Int64 // by Endpoint, Unix time in nanoseconds; 0: not missing
}

// RecordMissingEndpoint records that the replica answered that it does not serve e. It
// counts until missingEndpointLifetime is over, or the replica seems to be another process.
func (b *Backend) RecordMissingEndpoint(e Endpoint, now time.Time) {
	b.missing.expiry[e].Store(now.Add(missingEndpointLifetime).UnixNano())
}

// LacksEndpoint reports whether the replica is known not to serve e.
func (b *Backend) LacksEndpoint(e Endpoint, now time.Time) bool {
	expiry := b.missing.expiry[e].Load()
	return expiry != 0 && now.UnixNano() < expiry
}

// ForgetMissingEndpoints forgets which endpoints the replica lacks. The health checks and
// the poller call it when the replica may be another process.
func (b *Backend) ForgetMissingEndpoints() {
	for e := range b.missing.expiry {
		b.missing.expiry[e].Store(0)
	}
}
