//go:build !unix

package transport

// probeIdleSocket always returns true: stale connections are found by the retry alone.
func probeIdleSocket(fd uintptr) (idle bool) { return true }
