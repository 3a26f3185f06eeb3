//go:build race

package e2e

// memoryCost is what the race detector multiplies memory by, about: its own, and
// that of pools, which it has forget now and then.
const memoryCost = 16

// raceEnabled reports whether the tests run with the race detector.
const raceEnabled = true

// minParallel leaves the number to the processors, which the race detector keeps busy.
const minParallel = 1
