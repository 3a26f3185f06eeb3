package main

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// ignoreConnections has the kernel drop requests for new connections to l. Those that are
// being opened can still be accepted. The socket stays so in other processes as well.
func ignoreConnections(l net.Listener) error {
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

// takeConnections undoes ignoreConnections.
func takeConnections(l net.Listener) {
	_ = controlSocket(l, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // fails where there is no filter
	})
}

// controlSocket calls f with the descriptor of l.
func controlSocket(l net.Listener, f func(fd int) error) error {
	conn, ok := l.(syscall.Conn)
	if !ok {
		return errors.ErrUnsupported
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}
