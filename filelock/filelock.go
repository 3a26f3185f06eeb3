// Package filelock keeps a file to one process.
package filelock

import "errors"

// ErrLocked says that another process has the lock, or another opening of the file.
var ErrLocked = errors.New("locked by another process")
