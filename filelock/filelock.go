// Package filelock locks files against other processes.
package filelock

import "errors"

// ErrLocked is returned for a file that is locked by another process or through another descriptor.
var ErrLocked = errors.New("locked by another process")
