//go:build !race

package proxy

// memoryCost is what tests multiply bounds on memory by.
const memoryCost = 1
