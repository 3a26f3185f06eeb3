//go:build !unix

package accesslog

import "os"

// duplicate opens a standard stream again.
func duplicate(stream *os.File) (*os.File, error) { return os.OpenFile(stream.Name(), os.O_WRONLY, 0) }
