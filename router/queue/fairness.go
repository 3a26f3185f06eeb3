package queue

const (
	maxTenants     = 1024
	maxLeadSeconds = 60 // that a tenant is put back at most
)

// fairness keeps one tenant's flood from starving the others: each request of a
// tenant that asks for more than its share of the fleet counts as if it had come
// later, by the time that its share of the fleet takes for what came before it. A
// tenant's own requests keep their order among themselves.
//
// Its memory is fixed: tenants are distinguished by a hash, and two that collide are
// treated as one. Requests without a key are one tenant, but only while there are
// requests with keys: without any there is nothing to share.
type fairness struct {
	usedUntil [maxTenants]float64 // second up to which a tenant's share is used
	queued    [maxTenants]int     // its requests in the queue
	tenants   int                 // that have any
	keysUntil float64             // second up to which the last request with a key counts
}

// chargeTenant charges a tenant for so many tokens, at the fleet's prefill rate. It
// returns the second at which the request counts as arrived, and how many seconds
// of its share it used.
func (f *fairness) chargeTenant(tenant uint64, tokens, tokensPerSecond, now float64) (effectiveArrival, usedSeconds float64) {
	switch {
	case tenant != 0:
		f.keysUntil = now + maxLeadSeconds
	case now >= f.keysUntil:
		return now, 0
	}
	u := &f.usedUntil[tenant%maxTenants]
	effectiveArrival = max(now, *u)
	*u = max(*u, min(effectiveArrival+tokens*float64(max(1, f.tenants))/tokensPerSecond, now+maxLeadSeconds))
	return effectiveArrival, *u - effectiveArrival
}

func (f *fairness) refundTenant(tenant uint64, usedSeconds float64) {
	f.usedUntil[tenant%maxTenants] -= usedSeconds
}

func (f *fairness) addQueued(tenant uint64) {
	n := &f.queued[tenant%maxTenants]
	if *n++; *n == 1 {
		f.tenants++
	}
}

func (f *fairness) removeQueued(tenant uint64) {
	n := &f.queued[tenant%maxTenants]
	if *n--; *n == 0 {
		f.tenants--
	}
}
