package transport

import (
	"errors"
	"net"
	"strings"
	"syscall"
)

// IsOutOfDescriptors reports whether err is for want of a file descriptor, of this
// process or of the whole machine. It says nothing about the other side.
func IsOutOfDescriptors(err error) bool {
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return true
	}
	// The error of a name lookup has only the text of its cause.
	lookup, ok := errors.AsType[*net.DNSError](err)
	return ok && (strings.Contains(lookup.Err, syscall.EMFILE.Error()) || strings.Contains(lookup.Err, syscall.ENFILE.Error()))
}
