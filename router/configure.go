package router

import (
	"fmt"

	"warmroute/router/policy"
)

// Configure changes what may change while requests are decided: Policy and
// Settings, Hold, Breaker, SLO, PollInterval and NoLearning. The rest of o is not
// looked at. On an error nothing has changed.
//
// Nobody is turned away who waits already: requests that no rule holds any more
// are sent, and a shorter queue, or a shorter time in it, is for those to come.
// A policy keeps what it remembers unless its name or its settings change.
func (r *Router) Configure(o Options) error {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	o.PolicySettings.SLO = o.SLO
	if r.policy == nil || o.Policy != r.policyDef.Name || o.PolicySettings != r.settings {
		def, err := policy.Lookup(o.Policy)
		if err != nil {
			return fmt.Errorf("routing.policy: %w", err)
		}
		r.policy, r.policyDef, r.settings = def.New(o.PolicySettings, r.rand), def, o.PolicySettings
	}
	r.holding = o.Queue
	r.breaking = o.Breaker
	r.late = r.policyDef.UsesQueue && o.Queue.Requests > 0
	r.pollInterval = o.PollInterval
	r.noLearning = o.NoLearning
	now := r.now()
	if o.Breaker.Failures == 0 { // no outcome would count, so nothing else would close them
		for _, p := range r.progress {
			p.breaker.close(now)
		}
	}
	for before := -1; r.queue.count > 0 && r.queue.count != before; { // a round sends so many only
		before = r.queue.count
		r.dispatch(now)
	}
	return nil
}

// Policy is the name of the one in use.
func (r *Router) Policy() string {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	return r.policyDef.Name
}
