//go:build race

package proxy

// memoryCost is what the race detector multiplies memory by, about: its own, and
// that of pools, which it has forget now and then.
const memoryCost = 16
