//go:build !linux

package server

import (
	"errors"
	"net"
)

// ignoreConnections is for Linux.
func ignoreConnections(net.Listener) error { return errors.ErrUnsupported }

func acceptConnections(net.Listener) {}
