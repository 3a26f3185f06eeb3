package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"syscall"
)

// cannotListen says why there can be no listener on an address, and what to do.
// flag is the one that gives another.
func cannotListen(flag, address string, err error) error {
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is in use by another process; end that one (ss -ltnp shows it), or choose another address with --%s", address, flag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s: not permitted; ports below 1024 are for root or CAP_NET_BIND_SERVICE; choose another with --%s", address, flag)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s is no address of this machine; choose another with --%s", address, flag)
	case errors.As(err, &dns):
		return fmt.Errorf("%s: there is no host of that name; choose another address with --%s", address, flag)
	}
	return fmt.Errorf("listen on %s: %w; choose another address with --%s", address, err, flag)
}

// cannotRead says why a file that the command line names cannot be read.
func cannotRead(flag, path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %s: there is no such file", flag, path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s %s: this user may not read it", flag, path)
	case errors.Is(err, syscall.EISDIR):
		return fmt.Errorf("%s %s is a directory; name a file", flag, path)
	}
	return err
}
