package transport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
)

func TestIsOutOfDescriptors(t *testing.T) {
	dial := func(err error) error {
		return &ConnectError{"a:80", &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", err)}}
	}
	for want, errs := range map[bool][]error{
		true: {
			dial(syscall.EMFILE), dial(syscall.ENFILE), fmt.Errorf("/health: %w", dial(syscall.EMFILE)),
			&ConnectError{"a:80", &net.OpError{Op: "dial", Err: &net.DNSError{Name: "a", Err: "dial udp 10.0.0.1:53: socket: too many open files"}}},
		},
		false: {nil, errors.New("too many open files, says the replica"), dial(syscall.ECONNREFUSED),
			&net.DNSError{Name: "a", Err: "no such host"}},
	} {
		for _, err := range errs {
			if IsOutOfDescriptors(err) != want {
				t.Errorf("%v: want %v", err, want)
			}
		}
	}
}
