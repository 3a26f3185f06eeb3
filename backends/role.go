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

// PairsWith reports whether one replica can read KV caches of the other, as far as both tell: they run the same version
// of vLLM, have a connector, and keep KV in blocks of the same size and type.
func (b *Backend) PairsWith(o *Backend) bool {
	mine, others := b.Load(), o.Load()
	return b.Version() != "" && b.Version() == o.Version() && mine != nil && others != nil &&
		mine.TransfersKV && others.TransfersKV && mine.BlockSize == others.BlockSize && mine.CacheDtype == others.CacheDtype
}
