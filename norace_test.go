//go:build !race

package main

// memoryCost is what tests multiply bounds on memory by.
const memoryCost = 1
