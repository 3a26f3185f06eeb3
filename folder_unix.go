//go:build unix

package main

import "golang.org/x/sys/unix"

// mayCreateIn is why no file can be made in a folder.
func mayCreateIn(folder string) error { return unix.Access(folder, unix.W_OK|unix.X_OK) }
