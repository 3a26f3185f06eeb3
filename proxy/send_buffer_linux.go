package proxy

import (
	"net"
	"syscall"
)

// tcpNotsentLowat is TCP_NOTSENT_LOWAT, which package syscall lacks.
const tcpNotsentLowat = 0x19

// boundUnsent bounds what the kernel takes for a client beyond what is on its way.
// Else that grows to megabytes for each client that does not read; and a write that
// waits goes on only when a third of it is gone, which one that reads slowly, but
// reads, may not manage in the time that a write may wait. SetWriteBuffer would
// bound what is on its way as well, and with it the speed over long distances.
func boundUnsent(conn *net.TCPConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpNotsentLowat, mostUnsent)
	})
}
