//go:build !unix

package config

// checkDirWritable always returns nil: here it is unknown until a file is created.
func checkDirWritable(dir string) error { return nil }
