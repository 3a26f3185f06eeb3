//go:build !race

package e2e

// memoryCost is what tests multiply bounds on memory by.
const memoryCost = 1

const raceEnabled = false
