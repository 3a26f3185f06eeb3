package decide_test

import (
	"fmt"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

// Two backends serve a model, and b holds the first 30 of a prompt's 40 blocks. It is chosen until
// it has so much to compute that the other one costs less.
func ExampleFleet_Choose() {
	const blockBytes = 256
	now := time.Unix(0, 0)
	estimates := estimate.New(blockBytes, 1)
	accounts := ledger.New(blockBytes, index.New(0, 1<<20), estimates, now)
	rule, err := policy.Registry{}.Lookup("prefix")
	if err != nil {
		panic(err)
	}
	fleet := decide.Fleet{Now: now, Policy: rule, BlockBytes: blockBytes, Ledger: accounts, Estimates: estimates}
	request := decide.Request{Blocks: make([]prompt.Block, 40), Bytes: 40 * blockBytes}
	for slot, name := range []string{"a", "b"} {
		b := &backends.Backend{Name: name, Slot: slot}
		accounts.SetBackend(slot, b)
		request.Backends = append(request.Backends, b)
		fleet.Backends = append(fleet.Backends, decide.Backend{
			Backend: b, Slot: slot, Availability: decide.Availability{State: backends.Ready}, Weight: 1, PrefillRate: 8000,
		})
	}
	query := decide.Query{Request: &request, Sizes: estimates.TokenSizes(request.Model, request.TextClass), Matched: []int{0, 30}}

	for _, queued := range []float64{0, 0.01, 0.1} {
		fleet.Backends[1].QueuedSeconds = queued
		var candidates decide.Candidates
		if err := fleet.Filter(&query, &candidates); err != nil {
			panic(err)
		}
		choice := fleet.Choose(&query, &candidates, rule.New(policy.Options{}), nil)
		fmt.Printf("%v s queued on b: %s computes %v tokens, reason %s\n",
			queued, choice.Backend.Backend.Name, choice.Candidate.UncachedTokens, fleet.Reason(&query, &candidates, choice))
	}

	// Output:
	// 0 s queued on b: b computes 640 tokens, reason prefix
	// 0.01 s queued on b: b computes 640 tokens, reason prefix
	// 0.1 s queued on b: a computes 2560 tokens, reason matched_busy
}
