//go:build !unix

package main

// monotonicMicroseconds is for systemd, which is not here.
func monotonicMicroseconds() string { return "0" }
