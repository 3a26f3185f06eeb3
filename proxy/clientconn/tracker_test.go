package clientconn

import (
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// Of the connections without a request the one that has been idle longest is closed, and none
// that has just been used.
func TestRemoveLongestIdleConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const minIdle = minEvictedIdle
		var tracker Tracker
		if tracker.removeLongestIdle(0, minIdle, nil) != nil {
			t.Error("there is none")
		}
		conns := make([]net.Conn, 4)
		for i := range conns {
			conns[i], _ = net.Pipe()
			tracker.record(conns[i], http.StateNew)
			time.Sleep(minIdle / 10)
		}
		tracker.record(conns[0], http.StateActive)
		if tracker.removeLongestIdle(0, minIdle, nil) != nil {
			t.Error("all are too new")
		}
		time.Sleep(minIdle)
		tracker.record(conns[1], http.StateActive)
		tracker.record(conns[1], http.StateIdle)
		if tracker.removeLongestIdle(len(conns), minIdle, nil) != nil {
			t.Error("no more than allowed are open")
		}
		for i, want := range []net.Conn{conns[2], conns[3], nil} {
			if got := tracker.removeLongestIdle(0, minIdle, nil); got != want {
				t.Errorf("%d: another connection was removed", i)
			}
		}
		time.Sleep(minIdle)
		if tracker.removeLongestIdle(0, minIdle, nil) != conns[1] {
			t.Error("the last idle one was not removed")
		}
	})
}
