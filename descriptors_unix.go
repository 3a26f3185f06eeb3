//go:build unix

package main

import "syscall"

// descriptorLimit is how many files this process may have open. Go has raised it
// to the hard limit by now.
func descriptorLimit() (most uint64, known bool) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, false
	}
	return uint64(limit.Cur), true
}
