package queue

import "math"

const (
	maxTenants = 1024
	// tenantParts is into how many parts the share of a tenant may be divided. The first bits of a Tenant say which.
	tenantParts   = 64
	tenantPartBit = 64 - 6
	// maxIdleLeadSeconds is by how much a tenant without a queued request is put back at most.
	maxIdleLeadSeconds = 60
)

// TenantID returns the Tenant of an Item: that of a tenant's hash, 0 for none in particular, and of the hash of which part of the
// tenant's share is used.
func TenantID(tenant, part uint64) uint64 {
	if tenant == 0 {
		return 0
	}
	return max(tenant%(1<<tenantPartBit), 1) | part%tenantParts<<tenantPartBit
}

// fairness keeps one tenant's flood from starving the others: each request of a tenant that asks for more than
// its share of the fleet counts as if it had come later, by the time that its share of the fleet takes for what
// came before it. A tenant's own requests keep their order among themselves, unless they are of several parts, which
// have equal shares of the tenant's. Classes are apart, because they are not served in one order.
//
// Its memory is fixed: tenants are distinguished by a hash, and two that collide are
// treated as one. So are parts: however many there are, a tenant gains nothing by them. Requests without a tenant
// are one tenant, but only while there are requests with one: without any there is nothing to share.
type fairness struct {
	accounts     *[classCount][maxTenants]tenantAccount // apart, so that the garbage collector does not read them
	tenants      [classCount]int                        // that have a queued request
	waiting      [classCount]int                        // tenants that have a request in the queue or outside it
	tenantsUntil float64                                // second up to which the last request with a tenant counts
}

// tenantAccount is what a tenant has asked for in one class.
type tenantAccount struct {
	parts   [tenantParts]partAccount
	queued  int     // parts that have a queued request
	waiting Waiting // its requests in the queue and outside it
}

// partAccount is what a part of a tenant has asked for.
type partAccount struct {
	usedUntil float64 // second up to which its share is used
	queued    int     // its requests in the queue
	charged   float64 // seconds of its share that these were charged
}

func (f *fairness) account(c Class, tenant uint64) *tenantAccount {
	return &f.accounts[c][tenant%maxTenants]
}

func (f *fairness) part(c Class, tenant uint64) *partAccount {
	return &f.account(c, tenant).parts[tenant>>tenantPartBit]
}

// chargeTenant charges a tenant for so many tokens, at the fleet's prefill rate. It returns the second at which
// the request counts as arrived, at most maxLead later, and how many seconds of its share it used.
func (f *fairness) chargeTenant(c Class, tenant uint64, tokens, tokensPerSecond, maxLeadSeconds, now float64) (effectiveArrival,
	usedSeconds float64) {
	switch {
	case tenant != 0:
		f.tenantsUntil = now + maxIdleLeadSeconds
	case now >= f.tenantsUntil:
		return now, 0
	}
	t, a := f.account(c, tenant), f.part(c, tenant)
	seconds := tokens * float64(max(1, f.tenants[c])) / tokensPerSecond // of the tenant's share
	if a.queued == 0 {
		// Each other part has a turn before, or many parts would have theirs at once.
		a.usedUntil = max(min(a.usedUntil, now+maxIdleLeadSeconds), now+seconds*float64(t.queued))
	}
	latest := now + max(maxIdleLeadSeconds, maxLeadSeconds)
	effectiveArrival = max(now, a.usedUntil)
	a.usedUntil = min(effectiveArrival+seconds*float64(max(1, t.queued)), max(a.usedUntil, latest))
	return effectiveArrival, a.usedUntil - effectiveArrival
}

func (f *fairness) refundTenant(c Class, tenant uint64, usedSeconds float64) {
	f.part(c, tenant).usedUntil -= usedSeconds
}

func (f *fairness) addQueued(c Class, tenant uint64, usedSeconds float64) {
	t, a := f.account(c, tenant), f.part(c, tenant)
	a.charged += usedSeconds
	if a.queued++; a.queued == 1 {
		if t.queued++; t.queued == 1 {
			f.tenants[c]++
		}
	}
}

func (f *fairness) removeQueued(c Class, tenant uint64, usedSeconds float64) {
	t, a := f.account(c, tenant), f.part(c, tenant)
	a.charged -= usedSeconds
	if a.queued--; a.queued == 0 {
		a.charged = 0 // no rounding error is left
		if t.queued--; t.queued == 0 {
			f.tenants[c]--
		}
	}
}

// addWaiting counts a tenant's requests that wait, in the queue or outside it, or no longer wait.
func (f *fairness) addWaiting(c Class, tenant uint64, count int, bytes int64) {
	a := f.account(c, tenant)
	waited := a.waiting.Count > 0
	a.waiting.add(count, bytes, 0)
	switch waits := a.waiting.Count > 0; {
	case waits && !waited:
		f.waiting[c]++
	case waited && !waits:
		f.waiting[c]--
	}
}

// hasRoom reports whether the bounds of a class, of which all requests use so much, have room for one of a tenant. A
// tenant may use all of a bound. Once it is used, tenants that have less than an equal share of it may exceed it by three
// quarters, and those of which nothing waits may double it.
func (f *fairness) hasRoom(c Class, tenant uint64, used, limit Waiting, bytes int) bool {
	own, tenants := f.account(c, tenant).waiting, f.waiting[c]
	if own.Count == 0 {
		tenants++
	}
	fits := func(limit, used, own, n int64) bool {
		total := used + n
		switch {
		case total <= limit:
			return true
		case own == 0:
			return tenants > 1 && total <= 2*limit
		}
		return own+n <= limit/int64(tenants) && total <= 2*limit-limit/4
	}
	return fits(int64(limit.Count), int64(used.Count), int64(own.Count), 1) &&
		(limit.Bytes == 0 || fits(limit.Bytes, used.Bytes, own.Bytes, int64(bytes)))
}

// earliestArrival returns the second before which no lead makes a tenant's request arrive: that up to which what the
// tenant was served has used its share. So leads change the order of its own requests, and what the others get stays the
// same. There is no such limit while no other tenant, or part of it, has a queued request.
func (f *fairness) earliestArrival(c Class, tenant uint64) float64 {
	if f.tenants[c] <= 1 && f.account(c, tenant).queued <= 1 {
		return math.Inf(-1)
	}
	return f.servedUntil(c, tenant)
}

// servedUntil returns the second up to which what a tenant was served has used its share.
func (f *fairness) servedUntil(c Class, tenant uint64) float64 {
	a := f.part(c, tenant)
	return a.usedUntil - a.charged
}
