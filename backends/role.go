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

// KVForm is in which form a replica keeps KV caches, as far as it tells. The zero value: it does not, or has no connector.
type KVForm struct {
	version    string // of vLLM
	blockSize  int
	cacheDtype string
}

// KVForm returns the form of the replica's KV caches.
func (b *Backend) KVForm() KVForm {
	version, l := b.Version(), b.Load()
	if version == "" || l == nil || !l.TransfersKV {
		return KVForm{}
	}
	return KVForm{version, l.BlockSize, l.CacheDtype}
}

// PairsWith reports whether replicas with the two forms can read KV caches of each other.
func (k KVForm) PairsWith(o KVForm) bool { return k != KVForm{} && k == o }
