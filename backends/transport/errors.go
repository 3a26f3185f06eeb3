package transport

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
)

// ErrInvalidRequest is the error of a request that was not sent, or not completely: a
// header would break the framing, or the body does not have its ContentLength.
var ErrInvalidRequest = errors.New("invalid request")

// ErrInvalidResponse is the error of a response that breaks the rules of HTTP/1 or Options.MaxHeaderBytes.
var ErrInvalidResponse = errors.New("invalid response")

// invalidResponse is the text of an error that is ErrInvalidResponse.
type invalidResponse string

func (e invalidResponse) Error() string { return string(e) }

// Is reports whether target is ErrInvalidResponse.
func (e invalidResponse) Is(target error) bool { return target == ErrInvalidResponse }

// ConnectError is returned when no connection to the replica could be made: refused, timed out,
// invalid certificate, or MaxConns reached. Nothing was sent.
type ConnectError struct {
	Addr string
	Err  error
}

// Error names the dialed address only if it differs from Addr: logs have the backend
// beside the error.
func (e *ConnectError) Error() string {
	dial, ok := errors.AsType[*net.OpError](e.Err)
	if !ok || dial.Op != "dial" {
		return "connect: " + e.Err.Error()
	}
	text := "connect: "
	if dial.Addr != nil && dial.Addr.String() != e.Addr {
		text = "connect to " + dial.Addr.String() + ": "
	}
	if call, ok := errors.AsType[*os.SyscallError](dial.Err); ok {
		return text + call.Err.Error()
	}
	return text + dial.Err.Error()
}

func (e *ConnectError) Unwrap() error { return e.Err }

// MaxConnsReached reports whether Options.MaxConns was reached, which is not a fault of
// the replica.
func (e *ConnectError) MaxConnsReached() bool { return errors.Is(e.Err, errMaxConns) }

// OutOfDescriptors reports whether there was no file descriptor left, which is
// not a fault of the replica.
func (e *ConnectError) OutOfDescriptors() bool { return IsOutOfDescriptors(e.Err) }

// StaleError is returned when a reused connection ended before the first byte of a response: while
// the request was written, or within StaleTimeout of it. Most likely the replica closed it as idle
// and has not processed the request. To retry, set Request.Close, which uses a new connection.
type StaleError struct{ Err error }

func (e *StaleError) Error() string { return "stale connection: " + e.Err.Error() }
func (e *StaleError) Unwrap() error { return e.Err }

// IsOutOfDescriptors reports whether err means that this process or machine has no
// file descriptor left.
func IsOutOfDescriptors(err error) bool {
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return true
	}
	// A name lookup's error has only the text of its cause.
	lookup, ok := errors.AsType[*net.DNSError](err)
	return ok && (strings.Contains(lookup.Err, syscall.EMFILE.Error()) || strings.Contains(lookup.Err, syscall.ENFILE.Error()))
}
