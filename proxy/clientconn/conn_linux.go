package clientconn

import (
	"io"
	"math"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const canAwaitHangup = true

// readUntilHangup blocks until the peer has closed its connection or at least its writing side, and returns io.EOF; or until the read
// deadline or Close, and returns that error. It reads nothing: the runtime wakes it for each event of the socket.
//
// No wake-up is lost, although the runtime registers sockets edge-triggered:
//
//   - A hang-up is a state of the socket that stays. RawConn.Read forgets earlier events, then calls the function, and only then
//     waits. The function finds a hang-up before the call; one after it ends the wait, even if nothing waits yet.
//   - Data wake it as well, and the function, which finds no hang-up, is called again. The bytes stay in the socket, which the next
//     Read asks before it waits.
//   - A deadline in the past is a state too, and the wait looks at it before it blocks. It would be missed if it were moved to the
//     future meanwhile. Only the goroutine that serves the connection does that, after net/http has had it wait for the reader
//     (connReader.abortPendingRead); others set deadlines in the past alone (Activity.Cancel).
//   - Only one reader waits at a time: RawConn.Read and Read hold the same lock, and with it the descriptor.
func readUntilHangup(raw syscall.RawConn) error {
	err := raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, _ := unix.Poll(poll, 0) // a signal interrupts it only if there is no hang-up
		return n > 0
	})
	if err != nil {
		return err
	}
	return io.EOF
}

// setSendLimits bounds what the kernel keeps for a client beyond what is in flight, and for how long it goes on sending to a client
// that acknowledges nothing.
//
// Without the first bound the send buffer grows to megabytes for each client that does not read, and a blocked write continues only
// when a third of that is free, which a slow reader may not manage within the write deadline. SetWriteBuffer would also bound what
// is in flight, and with it the speed over long distances.
//
// The second is a quarter longer than the write deadline, so that a client that is there and does not read meets that one first.
// 0: the kernel's default, about a quarter of an hour.
func setSendLimits(conn *net.TCPConn, ackTimeout time.Duration) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, maxUnsentBytes)
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(min((ackTimeout+ackTimeout/4).Milliseconds(), math.MaxInt32)))
	})
}
