//go:build !linux

package clientconn

import (
	"net"
	"syscall"
	"time"
)

const canAwaitHangup = false

func readUntilHangup(syscall.RawConn) error { return nil }

// setSendLimits bounds what the kernel keeps for a client that does not read.
func setSendLimits(conn *net.TCPConn, _ time.Duration) { _ = conn.SetWriteBuffer(maxUnsentBytes) }
