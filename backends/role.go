package backends

import "fmt"

// Role is the part of requests that a replica is meant for.
type Role int

const (
	RoleBoth    Role = iota // whole requests
	RolePrefill             // prompts, whose KV cache other replicas read
	RoleDecode              // outputs
)

var roleNames = [...]string{RoleBoth: "both", RolePrefill: "prefill", RoleDecode: "decode"}

func (r Role) String() string { return roleNames[r] }

// ParseRole returns the role of a name; that of "" is RoleBoth.
func ParseRole(name string) (Role, error) {
	for role, n := range roleNames {
		if name == n || name == "" {
			return Role(role), nil
		}
	}
	return RoleBoth, fmt.Errorf("unknown role %q: use both, prefill or decode", name)
}

// Version returns the version of vLLM that the replica runs; "" if it is not known.
func (b *Backend) Version() string { return "" }

// PairsWith reports whether the replicas can send each other KV caches, as far as is known: they run the same version of
// vLLM, and keep KV in the same form.
func (b *Backend) PairsWith(o *Backend) bool {
	return b.Version() != "" && b.Version() == o.Version()
}
