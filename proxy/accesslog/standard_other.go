//go:build !unix

package accesslog

import "os"

// standard opens a standard stream once more.
func standard(stream *os.File) (*os.File, error) { return os.OpenFile(stream.Name(), os.O_WRONLY, 0) }
