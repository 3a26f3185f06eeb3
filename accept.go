package main

import (
	"errors"
	"net"
)

// retryingListener makes net/http's server accept again, 5 ms to 1 s later, after
// any error but the listener's closing. By itself it ends after errors that do not
// call themselves temporary, and accept(2) returns such for a lack of memory, and
// for a network error of the one connection.
type retryingListener struct {
	net.Listener
	failed func(error)
}

// Accept implements net.Listener.
func (l retryingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil || errors.Is(err, net.ErrClosed) {
		return c, err
	}
	l.failed(err)
	return nil, temporaryError{err}
}

// temporaryError is a net.Error after which net/http's server accepts again.
type temporaryError struct{ error }

func (temporaryError) Timeout() bool   { return false }
func (temporaryError) Temporary() bool { return true }
func (e temporaryError) Unwrap() error { return e.error }
