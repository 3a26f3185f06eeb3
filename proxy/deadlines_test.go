package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// lazyPipe is a lazyConn, and its other end.
func lazyPipe(t *testing.T) (*lazyConn, net.Conn) {
	ours, theirs := net.Pipe()
	t.Cleanup(func() {
		ours.Close()
		theirs.Close()
	})
	return &lazyConn{Conn: ours}, theirs
}

// TestLazyReadDeadlines sets deadlines one after another, each so long after the
// one before, and then reads what never comes.
func TestLazyReadDeadlines(t *testing.T) {
	type set struct{ after, deadline time.Duration } // deadline: from then on; 0: none
	const atOnce = -1
	for _, c := range []struct {
		name string
		sets []set
		want time.Duration // that the read waits; 0: for ever
	}{
		{"one", []set{{0, 3 * time.Second}}, 3 * time.Second},
		{"sooner", []set{{0, time.Minute}, {0, time.Second}}, time.Second},
		{"later", []set{{0, time.Second}, {0, time.Minute}}, time.Minute},
		{"later, when the first has passed", []set{{0, time.Second}, {2 * time.Second, time.Minute}}, time.Minute},
		{"lifted", []set{{0, time.Second}, {0, 0}}, 0},
		{"lifted, and set again", []set{{0, time.Second}, {0, 0}, {0, 4 * time.Second}}, 4 * time.Second},
		{"in the past", []set{{0, atOnce}}, atOnce},
		{"in the past, and lifted", []set{{0, atOnce}, {0, 0}}, 0},
		{"in the past, and a short one", []set{{0, atOnce}, {0, time.Second}}, time.Second},
		{"in the past, lifted, and a long one", []set{{0, atOnce}, {0, 0}, {0, time.Hour}}, time.Hour},
		{"long, lifted, and in the past", []set{{0, time.Hour}, {0, 0}, {0, atOnce}}, atOnce},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn, _ := lazyPipe(t)
				for _, s := range c.sets {
					time.Sleep(s.after)
					at := time.Time{}
					switch s.deadline {
					case 0:
					case atOnce:
						at = time.Unix(1, 0)
					default:
						at = time.Now().Add(s.deadline)
					}
					conn.SetReadDeadline(at)
				}
				begun := time.Now()
				ended := make(chan error, 1)
				go func() {
					_, err := conn.Read(make([]byte, 1))
					ended <- err
				}()
				if c.want == 0 {
					time.Sleep(24 * time.Hour)
					select {
					case err := <-ended:
						t.Fatalf("ended by itself: %v", err)
					default:
					}
					conn.SetReadDeadline(time.Unix(1, 0))
				}
				if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("ended with %v", err)
				}
				if waited := time.Since(begun); c.want != 0 && waited != max(0, c.want) {
					t.Fatalf("waited %v, not %v", waited, c.want)
				}
			})
		})
	}
}

// TestLazyReadGoesOn reads what comes after the deadline that the socket had.
func TestLazyReadGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, peer := lazyPipe(t)
		conn.SetReadDeadline(time.Now().Add(time.Second))
		conn.SetReadDeadline(time.Now().Add(time.Minute))
		go func() {
			time.Sleep(30 * time.Second)
			peer.Write([]byte("late"))
		}()
		got := make([]byte, 4)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "late" {
			t.Fatalf("got %q, %v", got, err)
		}
	})
}

// TestLazyWriteGoesOn writes to a peer that reads a part before the deadline that
// the socket had, the next one long after it, and then no more.
func TestLazyWriteGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, peer := lazyPipe(t)
		conn.SetWriteDeadline(time.Now().Add(time.Second))
		conn.SetWriteDeadline(time.Now().Add(time.Minute))
		parts := make(chan string, 2)
		go func() {
			for range cap(parts) {
				part := make([]byte, 3)
				io.ReadFull(peer, part)
				parts <- string(part)
				time.Sleep(30 * time.Second)
			}
		}()
		begun := time.Now()
		n, err := conn.Write([]byte("abcdefgh"))
		if waited := time.Since(begun); n != 6 || !errors.Is(err, os.ErrDeadlineExceeded) || waited != time.Minute {
			t.Fatalf("wrote %d, %v, after %v", n, err, waited)
		}
		if got := <-parts + <-parts; got != "abcdef" {
			t.Fatalf("the peer got %q", got)
		}
	})
}
