//go:build !unix

package main

import (
	"errors"
	"net"
	"os"
)

// notifyHandOver does nothing where there is no such signal.
func notifyHandOver(chan<- os.Signal) {}

func duplicate(net.Listener) (*os.File, error) { return nil, errors.ErrUnsupported }
