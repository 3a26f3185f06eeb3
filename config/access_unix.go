//go:build unix

package config

import "golang.org/x/sys/unix"

// checkDirWritable returns nil if this process may create a file in a directory.
func checkDirWritable(dir string) error { return unix.Access(dir, unix.W_OK|unix.X_OK) }
