package router

// fairness keeps one tenant's flood from starving others, within the order that
// the admission queue has anyway: each request of a tenant that asks for more than
// its share of the fleet counts as if it had come later, by the time that its
// share of the fleet takes for what came before it. So a tenant within its share
// passes the backlog of one beyond it, and a tenant's own requests keep their
// order among themselves.
//
// Its memory is fixed: tenants are told apart by a hash, and two that meet are
// treated as one. The zero tenant, nobody in particular, is one among those with
// keys: else who sends none would pass them all. Where nobody has a key there is
// nothing to share.
type fairness struct {
	until   [tenantAccounts]float64 // seconds since Router.made, to which its share is used up
	held    [tenantAccounts]int     // its requests in the queue
	holding int                     // accounts that have any
	keyed   float64                 // second up to which the last request with a key is remembered
}

const (
	tenantAccounts = 1024
	longestLead    = 60 // seconds that a tenant may be put back at most
)

// charge accounts for a request of so many tokens. It returns the second at
// which the request counts as arrived, and how many seconds it used up of its
// tenant's share. rate is the fleet's.
func (f *fairness) charge(tenant uint64, tokens, rate, now float64) (arrived, used float64) {
	switch {
	case tenant != 0:
		f.keyed = now + longestLead
	case now >= f.keyed:
		return now, 0
	}
	u := &f.until[tenant%tenantAccounts]
	arrived = max(now, *u)
	*u = max(*u, min(arrived+tokens*float64(max(1, f.holding))/rate, now+longestLead))
	return arrived, *u - arrived
}

// refund takes back what was used up by a request that no backend was sent.
func (f *fairness) refund(tenant uint64, used float64) { f.until[tenant%tenantAccounts] -= used }

func (f *fairness) enter(tenant uint64) {
	n := &f.held[tenant%tenantAccounts]
	if *n++; *n == 1 {
		f.holding++
	}
}

func (f *fairness) leave(tenant uint64) {
	n := &f.held[tenant%tenantAccounts]
	if *n--; *n == 0 {
		f.holding--
	}
}
