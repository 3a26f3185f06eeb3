package proxy

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// dropIncoming has the kernel drop all that comes for conn, as if its host had
// vanished.
func dropIncoming(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	})
	if err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

// The kernel takes what little a stream writes, so no write blocks: only the
// missing acknowledgements tell that the client has vanished.
func TestUnreachableClientEndsRequest(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	f := serve(t, func(o *Options) { o.WriteIdle = time.Second }, &replica{script: func(s *session) {
		defer close(ended)
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		for {
			select {
			case <-s.replica.over:
				return
			case <-time.After(50 * time.Millisecond):
			}
			if _, err := s.Write([]byte(chunk(world))); err != nil {
				return
			}
		}
	}})
	conn := f.askFrom(askStream)
	conn.Read(make([]byte, 1))
	dropIncoming(t, conn)
	select {
	case <-ended:
	case <-time.After(failsafe):
		t.Error("the replica is still at work")
	}
	f.awaitMetric(`warmroute_disconnected_requests_total{phase="in_stream"} 1`)
}
