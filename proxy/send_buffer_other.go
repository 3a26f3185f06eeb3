//go:build !linux

package proxy

import "net"

// boundUnsent bounds what the kernel takes for a client that does not read.
func boundUnsent(conn *net.TCPConn) { _ = conn.SetWriteBuffer(mostUnsent) }
