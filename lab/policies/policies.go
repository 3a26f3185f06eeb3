// Package policies has the policies of other routers and simple ones, which warmroute is compared
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
		{Name: "least-load", NamesElsewhere: []string{"leastload", "least_request", "least-request"}, New: func(o policy.Options) policy.Policy {
			return leastLoad{o.Rand}
		}},
		{Name: "round-robin", NamesElsewhere: []string{"round_robin", "roundrobin"}, New: func(policy.Options) policy.Policy {
			return &roundRobin{}
		}},
		{Name: "random", New: func(o policy.Options) policy.Policy { return random{o.Rand} }},
		{Name: "power-of-two", NamesElsewhere: []string{"power_of_two"}, New: func(o policy.Options) policy.Policy { return powerOfTwo{o.Rand} }},
		{
			Name: "session", NamesElsewhere: []string{"consistent_hash", "consistent_hashing"}, NeedsConversation: true,
			Settings: []string{"routing.client_affinity"},
			New:      func(o policy.Options) policy.Policy { return session{o.Rand, o.ClientAffinity} },
		},
		{Name: "sticky-least-loaded", NamesElsewhere: []string{"manual"}, NeedsConversation: true, New: newStickyLeastLoaded},
		{Name: "dualmap", New: func(o policy.Options) policy.Policy { return dualMap{o.Rand} }},
		{Name: "skywalker", UsesQueue: true, WaitsForIdle: true, New: func(o policy.Options) policy.Policy { return skyWalker{o.Rand} }},
		{Name: "chwbl", NamesElsewhere: []string{"prefixhash", "prefix_hash"}, Settings: []string{"routing.load_factor"}, New: newCHWBL},
		{
			Name: "cache-threshold", NamesElsewhere: []string{"cache_aware"},
			Settings: []string{"routing.match_ratio", "routing.match_tokens", "routing.imbalance_abs", "routing.imbalance_ratio"},
			New:      limited(newCacheThreshold),
		},
		{
			Name:     "cache-threshold-old",
			Settings: []string{"routing.match_ratio", "routing.match_tokens", "routing.imbalance_abs", "routing.imbalance_ratio"},
			New:      limited(newCacheThresholdOld),
		},
		{
			Name: "smg", NamesElsewhere: []string{"cache_aware"},
			Settings: []string{"routing.match_ratio", "routing.match_tokens", "routing.imbalance_abs", "routing.imbalance_ratio"},
			New:      limited(newSMG),
		},
		{Name: "weighted", PollInterval: 50 * time.Millisecond, New: limited(newWeighted)},
		{Name: "llmd-guide", Settings: []string{"routing.match_ratio", "routing.match_tokens"}, New: limited(newLLMDGuide)},
		{Name: "hashtrie", NamesElsewhere: []string{"prefixaware"}, New: limited(newHashTrie)},
		{Name: "simhash", New: func(policy.Options) policy.Policy { return &simHashRing{} }},
		{Name: "aibrix", NamesElsewhere: []string{"prefix-cache"}, Settings: []string{"routing.imbalance_abs"}, New: limited(newAIBrix)},
		{Name: "preble", Settings: []string{"routing.match_ratio", "routing.match_tokens"}, New: limited(newPreble)},
		{
			Name: "ray",
			Settings: []string{
				"routing.match_ratio", "routing.match_tokens", "routing.imbalance_abs",
				"routing.eviction_threshold", "routing.eviction_target", "routing.eviction_interval",
			},
			New: limited(newRay),
		},
		{Name: "dynamo", New: limited(newDynamo)},
		{Name: "lmetric", NamesElsewhere: []string{"kv_aware"}, New: func(o policy.Options) policy.Policy { return lMetric{o.Rand} }},
		{Name: "smetric", Settings: []string{"routing.match_ratio", "routing.match_tokens"}, New: newSMetric},
	}
}
