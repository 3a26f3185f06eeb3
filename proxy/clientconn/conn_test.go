package clientconn

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// TestBackgroundReadConsumesNothing reads as net/http does: a byte, until a deadline
// ends that, and then the rest.
func TestBackgroundReadConsumesNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	conn, err := NewListener(l, true).Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	SetActive(conn, http.StateActive)
	io.WriteString(peer, "ab")
	ended := make(chan error, 1)
	var one [1]byte
	go func() {
		n, err := conn.Read(one[:])
		if n > 0 {
			err = fmt.Errorf("read %d bytes, %v", n, err)
		}
		ended <- err
	}()
	time.Sleep(20 * time.Millisecond) // so that the bytes have come, most times
	conn.SetReadDeadline(time.Unix(1, 0))
	if canAwaitHangup {
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("ended with %v, want a timeout", err)
		}
	} else {
		<-ended
	}
	conn.SetReadDeadline(time.Time{})
	rest := bufio.NewReader(conn)
	for _, want := range []byte("ab") {
		if got, err := rest.ReadByte(); err != nil || got != want {
			t.Errorf("read %q (%v), want %q", got, err, want)
		}
	}
}
