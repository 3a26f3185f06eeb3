// Package policies has the rules of other routers and simple ones, which warmroute is compared
// with. To add one, write its file and its entry in definitions.
package policies

import (
	"time"

	"warmroute/router/policy"
)

// options are the parameters of a policy.
type options struct {
	policy.Options
	maxBlocks int // that it may remember
}

// All returns the policies.
func All() policy.Registry { return definitions(maxTableBlocks) }

// definitions returns the policies, each of which may remember so many blocks.
func definitions(maxBlocks int) policy.Registry {
	limited := func(newPolicy func(options) policy.Policy) func(policy.Options) policy.Policy {
		return func(o policy.Options) policy.Policy { return newPolicy(options{o, maxBlocks}) }
	}
	return policy.Registry{
		{Name: "least-load", New: func(o policy.Options) policy.Policy { return leastLoad{o.Rand} }},
		{Name: "round-robin", New: func(policy.Options) policy.Policy { return &roundRobin{} }},
		{Name: "random", New: func(o policy.Options) policy.Policy { return random{o.Rand} }},
		{Name: "power-of-two", New: func(o policy.Options) policy.Policy { return powerOfTwo{o.Rand} }},
		{Name: "session", NeedsSession: true, New: func(o policy.Options) policy.Policy { return session{o.Rand} }},
		{Name: "sticky-least-loaded", NeedsSession: true, New: newStickyLeastLoaded},
		{Name: "dualmap", New: func(o policy.Options) policy.Policy { return dualMap{o.Rand} }},
		{Name: "skywalker", UsesQueue: true, WaitsForIdle: true, New: func(o policy.Options) policy.Policy { return skyWalker{o.Rand} }},
		{Name: "chwbl", Settings: []string{"routing.load_factor"}, New: newCHWBL},
		{
			Name: "cache-threshold", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"},
			New: limited(newCacheThreshold),
		},
		{
			Name: "cache-threshold-old", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"},
			New: limited(newCacheThresholdOld),
		},
		{Name: "smg", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"}, New: limited(newSMG)},
		{Name: "weighted", PollInterval: 50 * time.Millisecond, New: limited(newWeighted)},
		{Name: "llmd-guide", Settings: []string{"routing.match_ratio"}, New: limited(newLLMDGuide)},
		{Name: "hashtrie", New: limited(newHashTrie)},
		{Name: "simhash", New: func(policy.Options) policy.Policy { return &simHashRing{} }},
		{Name: "aibrix", Settings: []string{"routing.imbalance_abs"}, New: limited(newAIBrix)},
		{Name: "preble", Settings: []string{"routing.match_ratio"}, New: limited(newPreble)},
		{Name: "ray", Settings: []string{"routing.match_ratio", "routing.imbalance_abs"}, New: limited(newRay)},
		{Name: "dynamo", New: limited(newDynamo)},
		{Name: "lmetric", New: func(o policy.Options) policy.Policy { return lMetric{o.Rand} }},
		{Name: "smetric", Settings: []string{"routing.match_ratio"}, New: newSMetric},
	}
}
