package main

import (
	"errors"
	"fmt"
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
