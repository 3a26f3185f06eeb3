package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Definition describes a policy: its name, the settings that it reads, and what
// it needs of the router. No code outside this package tests for a policy's name.
type Definition struct {
	Name     string   // value of the setting routing.policy
	Settings []string // keys of the configuration that have an effect under it

	UsesQueue      bool // requests may wait in the admission queue
	PushesToIdle   bool // with UsesQueue: until a backend has nothing to prefill, not until its next step has room
	NeedsKVWait    bool // Candidate.KVWaitTokens has to be filled, which takes time
	FiltersLength  bool // backends for which the prompt is too long are filtered out
	NeedsSession   bool // its rule is to keep sessions together, not only to break ties by them
	NeedsContext   bool // Candidate.Context has to be filled, which takes time
	ExplainsChoice bool // a decision's reason says how the match decided; else it is the policy's name

	// PollInterval is how often the router that the policy comes from polls its replicas,
	// by whose metrics it decides; 0: it decides by our own account.
	PollInterval time.Duration

	build func(options) Policy
}

// options are the parameters of a policy.
type options struct {
	Settings
	rng       *rand.Rand
	maxBlocks int // that it may remember
}

// registry holds every policy, in the order of Names.
var registry = []Definition{
	{
		Name: "prefix", Settings: []string{"slo.ttft"},
		UsesQueue: true, NeedsKVWait: true, FiltersLength: true, ExplainsChoice: true,
		build: func(o options) Policy { return &Prefix{SLO: o.SLO} },
	},
	{Name: "least-load", build: func(o options) Policy { return leastLoad{o.rng} }},
	{Name: "round-robin", build: func(options) Policy { return &roundRobin{} }},
	{Name: "random", build: func(o options) Policy { return random{o.rng} }},
	{Name: "power-of-two", build: func(o options) Policy { return powerOfTwo{o.rng} }},
	{Name: "session", NeedsSession: true, build: func(o options) Policy { return session{o.rng} }},
	{Name: "sticky-least-loaded", NeedsSession: true, build: newStickyLeastLoaded},
	{Name: "dualmap", build: func(o options) Policy { return dualMap{o.rng} }},
	{Name: "skywalker", UsesQueue: true, PushesToIdle: true, build: func(o options) Policy { return skyWalker{o.rng} }},
	{Name: "chwbl", Settings: []string{"routing.load_factor"}, build: newCHWBL},
	{
		Name: "cache-threshold", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"},
		build: newCacheThreshold,
	},
	{
		Name: "cache-threshold-old", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"},
		build: newCacheThresholdOld,
	},
	{Name: "smg", Settings: []string{"routing.match_ratio", "routing.imbalance_abs", "routing.imbalance_ratio"}, build: newSMG},
	{Name: "weighted", PollInterval: 50 * time.Millisecond, build: newWeighted},
	{Name: "llmd-guide", Settings: []string{"routing.match_ratio"}, build: newLLMDGuide},
	{Name: "hashtrie", build: newHashTrie},
	{Name: "simhash", build: func(options) Policy { return &simHashRing{} }},
	{Name: "aibrix", Settings: []string{"routing.imbalance_abs"}, build: newAIBrix},
	{Name: "preble", Settings: []string{"routing.match_ratio"}, build: newPreble},
	{Name: "ray", Settings: []string{"routing.match_ratio", "routing.imbalance_abs"}, build: newRay},
	{Name: "dynamo", NeedsContext: true, build: newDynamo},
	{Name: "lmetric", build: func(o options) Policy { return lMetric{o.rng} }},
	{Name: "smetric", Settings: []string{"routing.match_ratio"}, build: newSMetric},
}

// Names returns the values of the setting routing.policy.
func Names() []string {
	names := make([]string, len(registry))
	for i := range registry {
		names[i] = registry[i].Name
	}
	return names
}

// WithQueue is what a policy's name may end in: the same rule with the admission queue, which
// only prefix and skywalker have otherwise.
const WithQueue = "+queue"

// Lookup returns the definition of the policy of that name. The error names those
// that there are.
func Lookup(name string) (Definition, error) {
	rule, withQueue := strings.CutSuffix(name, WithQueue)
	for _, d := range registry {
		if d.Name == rule {
			d.Name, d.UsesQueue = name, d.UsesQueue || withQueue
			return d, nil
		}
	}
	return Definition{}, fmt.Errorf("unknown policy %q; choose one of %s", name, strings.Join(slices.Sorted(slices.Values(Names())), ", "))
}

// Reads reports whether a setting, given by its key in the configuration, has an
// effect under the policy.
func (d *Definition) Reads(setting string) bool { return slices.Contains(d.Settings, setting) }

// New makes a policy of that definition. What it leaves to chance it draws from
// rng.
func (d *Definition) New(settings Settings, rng *rand.Rand) Policy {
	return d.build(options{settings, rng, maxTableBlocks})
}
