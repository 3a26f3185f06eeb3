//go:build !unix

package server

import (
	"errors"
	"net"
	"os"
)

func fileDescriptorLimit() uint64 { return 0 }

func relayUpgradeSignal(c chan<- os.Signal) {}

func duplicateSocket(l net.Listener) (*os.File, error) { return nil, errors.ErrUnsupported }
