package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Definition describes a policy: its name, the settings that it reads, and what
// it needs of the router, which does not test for its name.
type Definition struct {
	Name     string   // value of the setting routing.policy
	Settings []string // keys of the configuration that have an effect under it

	// NamesElsewhere are what the routers from which the policy comes call it, unless that is Name.
	NamesElsewhere []string

	UsesQueue          bool // requests may wait in the admission queue
	WaitsForIdle       bool // with UsesQueue: until a backend has nothing to prefill, not until its next step has room
	NeedsKVWait        bool // Candidate.KVWaitSeconds has to be filled, which takes time
	FiltersLength      bool // backends for which the prompt is too long are filtered out
	NeedsConversation  bool // it keeps conversations together, not only to break ties by them
	ReportsMatchReason bool // a decision's reason says how the match decided; else it is the policy's name

	// PollInterval is how often the router that the policy comes from polls its replicas,
	// by whose metrics it decides; 0: it decides by our own account.
	PollInterval time.Duration

	New func(Options) Policy
}

// Options are the parameters of a policy.
type Options struct {
	Settings
	Rand *rand.Rand // from which it draws what it leaves to chance
}

// Reads reports whether a setting, given by its key in the configuration, has an effect under the policy.
func (d *Definition) Reads(setting string) bool { return slices.Contains(d.Settings, setting) }

// prefix is the definition of Prefix.
func prefix() Definition {
	return Definition{
		Name: "prefix", Settings: []string{"slo.ttft"},
		UsesQueue: true, NeedsKVWait: true, FiltersLength: true, ReportsMatchReason: true,
		New: func(Options) Policy { return &Prefix{} },
	}
}

// Registry has the policies that may be chosen beside prefix.
type Registry []Definition

// All returns the definitions of prefix and of the others.
func (r Registry) All() []Definition { return slices.Concat([]Definition{prefix()}, r) }

// Names returns the values of the setting routing.policy.
func (r Registry) Names() (names []string) {
	for _, d := range r.All() {
		names = append(names, d.Name)
	}
	return names
}

// DescribeUnknown returns what an error says of a name that is no policy: which policies other routers call so, or "".
func (r Registry) DescribeUnknown(name string) string {
	var same []string
	for _, d := range r.All() {
		if slices.Contains(d.NamesElsewhere, strings.ToLower(name)) {
			same = append(same, d.Name)
		}
	}
	if same == nil {
		return ""
	}
	return fmt.Sprintf("what other routers call so is %s here; the default, prefix, is warmroute's own", strings.Join(same, " or "))
}

// WithQueue is what a policy's name may end in: the same policy with the admission queue, which
// only prefix and skywalker have otherwise.
const WithQueue = "+queue"

// Lookup returns the definition of the policy of that name. The error names those that there are.
func (r Registry) Lookup(name string) (Definition, error) {
	base, withQueue := strings.CutSuffix(name, WithQueue)
	for _, d := range r.All() {
		if d.Name == base {
			d.Name, d.UsesQueue = name, d.UsesQueue || withQueue
			return d, nil
		}
	}
	if described := r.DescribeUnknown(name); described != "" {
		return Definition{}, fmt.Errorf("unknown policy %q; %s", name, described)
	}
	return Definition{}, fmt.Errorf("unknown policy %q; choose one of %s", name, strings.Join(slices.Sorted(slices.Values(r.Names())), ", "))
}
