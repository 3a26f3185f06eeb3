//go:build !unix

package server

import (
	"errors"
	"net"
	"os"
)

func fileDescriptorLimit() uint64 { return 0 }

func notifyHandOver(chan<- os.Signal) {}

func duplicate(net.Listener) (*os.File, error) { return nil, errors.ErrUnsupported }
