//go:build unix

package config

import "golang.org/x/sys/unix"

// canCreateFile returns nil if this process may create a file in a directory.
func canCreateFile(dir string) error { return unix.Access(dir, unix.W_OK|unix.X_OK) }
