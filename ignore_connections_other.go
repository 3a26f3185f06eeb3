//go:build !linux

package main

import (
	"errors"
	"net"
)

// ignoreConnections is for Linux.
func ignoreConnections(net.Listener) error { return errors.ErrUnsupported }

func acceptConnections(net.Listener) {}
