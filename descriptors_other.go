//go:build !unix

package main

// descriptorLimit is not known where there is none.
func descriptorLimit() (most uint64, known bool) { return 0, false }
