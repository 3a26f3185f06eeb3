//go:build !race

package e2e

// memoryCost is what tests multiply bounds on memory by.
const memoryCost = 1

const raceEnabled = false

// minParallel is how many tests run at once even on few processors, since most of them
// wait most of the time.
const minParallel = 8
