package transport

import (
	"context"
	"errors"
	"net"
	"net/url"
	"syscall"
	"testing"
	"time"
)

// blackhole is the address of a listener whose queue is full and that accepts
// nothing: the kernel drops what else would connect.
func blackhole(t *testing.T) string {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: name.(*syscall.SockaddrInet4).Port}
	for {
		c, err := net.DialTimeout("tcp", addr.String(), 50*time.Millisecond)
		if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
			return addr.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
}

func TestCancelDial(t *testing.T) {
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: blackhole(t)}, ConnectTimeout: time.Hour})
	ctx, cancel := context.WithTimeoutCause(failsafe(t), 20*time.Millisecond, errLeft)
	defer cancel()
	if _, err := send(ctx, transport, "hello"); err != errLeft {
		t.Errorf("error %v, want the cause", err)
	}
	idleConns(t, transport, 0)
}

func TestCancelDialOfShortRequest(t *testing.T) {
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: blackhole(t)}, ConnectTimeout: time.Hour})
	ctx, cancel := context.WithTimeoutCause(failsafe(t), 20*time.Millisecond, errLeft)
	defer cancel()
	if _, _, err := get("/").do(ctx, transport); err != errLeft || transport.OpenConns() != 0 {
		t.Errorf("error %v, %d connections; want the cause and none", err, transport.OpenConns())
	}
}

func TestDialTimeout(t *testing.T) {
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: blackhole(t)}, ConnectTimeout: 20 * time.Millisecond})
	_, err := send(failsafe(t), transport, "hello")
	if refused := (*ConnectError)(nil); !errors.As(err, &refused) {
		t.Errorf("error %v, want a ConnectError", err)
	}
	idleConns(t, transport, 0)
}
