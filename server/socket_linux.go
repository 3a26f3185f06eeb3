package server

import (
	"net"

	"golang.org/x/sys/unix"
)

// dropNewConnections has the kernel drop requests for new connections to l. Those that are
// being opened can still be accepted. The filter stays on the socket in other processes as well.
func dropNewConnections(l net.Listener) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 13}, // the flags of the TCP header
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0x12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x02, Jf: 1}, // SYN and not ACK
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},                          // is dropped
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 31},                    // all else is taken whole
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return controlSocket(l, func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	})
}

func stopDroppingConnections(l net.Listener) {
	_ = controlSocket(l, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // fails where there is no filter
	})
}
