package queue

const (
	maxTenants = 1024
	// maxIdleLeadSeconds is by how much a tenant without a queued request is put back at most.
	maxIdleLeadSeconds = 60
)

// fairness keeps one tenant's flood from starving the others: each request of a tenant that asks for more than
// its share of the fleet counts as if it had come later, by the time that its share of the fleet takes for what
// came before it. A tenant's own requests keep their order among themselves. Classes are apart, because they
// are not served in one order.
//
// Its memory is fixed: tenants are distinguished by a hash, and two that collide are
// treated as one. Requests without a key are one tenant, but only while there are
// requests with keys: without any there is nothing to share.
type fairness struct {
	accounts  [classCount][maxTenants]tenantAccount
	tenants   [classCount]int // that have a queued request
	keysUntil float64         // second up to which the last request with a key counts
}

// tenantAccount is what a tenant has asked for in one class.
type tenantAccount struct {
	usedUntil float64 // second up to which its share is used
	queued    int     // its requests in the queue
}

func (f *fairness) account(c Class, tenant uint64) *tenantAccount {
	return &f.accounts[c][tenant%maxTenants]
}

// chargeTenant charges a tenant for so many tokens, at the fleet's prefill rate. It returns the second at which
// the request counts as arrived, at most maxLead later, and how many seconds of its share it used.
func (f *fairness) chargeTenant(c Class, tenant uint64, tokens, tokensPerSecond, maxLeadSeconds, now float64) (effectiveArrival, usedSeconds float64) {
	switch {
	case tenant != 0:
		f.keysUntil = now + maxIdleLeadSeconds
	case now >= f.keysUntil:
		return now, 0
	}
	a := f.account(c, tenant)
	if a.queued == 0 {
		a.usedUntil = min(a.usedUntil, now+maxIdleLeadSeconds)
	}
	effectiveArrival = max(now, a.usedUntil)
	most := max(a.usedUntil, now+max(maxIdleLeadSeconds, maxLeadSeconds))
	a.usedUntil = min(effectiveArrival+tokens*float64(max(1, f.tenants[c]))/tokensPerSecond, most)
	return effectiveArrival, a.usedUntil - effectiveArrival
}

func (f *fairness) refundTenant(c Class, tenant uint64, usedSeconds float64) {
	f.account(c, tenant).usedUntil -= usedSeconds
}

func (f *fairness) addQueued(c Class, tenant uint64) {
	a := f.account(c, tenant)
	if a.queued++; a.queued == 1 {
		f.tenants[c]++
	}
}

func (f *fairness) removeQueued(c Class, tenant uint64) {
	a := f.account(c, tenant)
	if a.queued--; a.queued == 0 {
		f.tenants[c]--
	}
}
