//go:build !unix

package main

import (
	"errors"
	"net"
	"os"
)

func fileDescriptorLimit() uint64 { return 0 }

func notifyHandOver(chan<- os.Signal) {}

func duplicate(net.Listener) (*os.File, error) { return nil, errors.ErrUnsupported }
