//go:build !linux

package server

import (
	"errors"
	"net"
)

// dropNewConnections is for Linux.
func dropNewConnections(l net.Listener) error { return errors.ErrUnsupported }

func stopDroppingConnections(l net.Listener) {}
