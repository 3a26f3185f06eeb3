// Package freeport finds addresses for what tests start, stop and start again: nothing listens there, and no client connection
// takes the port meanwhile.
package freeport

import (
	"net"
	"strconv"
	"testing"

	"warmroute/lab/testbed"
)

// FindPorts returns n free ports of 127.0.0.1.
func FindPorts(t testing.TB, n int) (ports []string) {
	t.Helper()
	free, err := testbed.FreePorts(n)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range free {
		ports = append(ports, strconv.Itoa(port))
	}
	return ports
}

// FindAddresses returns n addresses, each 127.0.0.1 with a free port.
func FindAddresses(t testing.TB, n int) (addresses []string) {
	t.Helper()
	for _, port := range FindPorts(t, n) {
		addresses = append(addresses, net.JoinHostPort("127.0.0.1", port))
	}
	return addresses
}

// FindAddress returns 127.0.0.1 with a free port.
func FindAddress(t testing.TB) string {
	t.Helper()
	return FindAddresses(t, 1)[0]
}
