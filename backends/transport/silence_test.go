package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// counting counts the deadlines that are set.
type counting struct {
	net.Conn
	set int
}

func (c *counting) SetReadDeadline(at time.Time) error {
	c.set++
	return c.Conn.SetReadDeadline(at)
}

// fate is what became of a connection.
type fate struct{ released, discarded int }

// answerOver reads the header of an answer from c, as if it had been asked for.
func answerOver(c net.Conn, method string) (*http.Response, *fate, error) {
	f := new(fate)
	b := &Body{
		ctx: context.Background(),
		t:   New(Options{URL: &url.URL{Scheme: "http", Host: "replica"}}),
		c: &conn{
			Conn: c, raw: c,
			release: func() { f.released++ },
			discard: func() { f.discarded++; c.Close() },
			abort:   func() { c.Close() },
		},
		stop: func() bool { return true },
	}
	b.br = b.t.pool.AcquireReader(c)
	resp, err := b.response(&http.Request{Method: method})
	return resp, f, err
}

// stream is an endless answer over a pipe, in virtual time.
func stream(t *testing.T) (replica net.Conn, wire *counting, body *Body) {
	replica, ours := net.Pipe()
	wire = &counting{Conn: ours}
	go io.WriteString(replica, "HTTP/1.1 200 OK\r\n\r\n")
	resp, _, err := answerOver(wire, "GET")
	if err != nil {
		t.Fatal(err)
	}
	return replica, wire, resp.Body.(*Body)
}

func TestIdleTimeoutIsSilenceNotDuration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		go func() {
			for range 10 {
				time.Sleep(119 * time.Second)
				replica.Write([]byte("x"))
			}
		}()
		began := time.Now()
		got, err := io.ReadAll(body)
		if len(got) != 10 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes, error %v", len(got), err)
		}
		if took := time.Since(began); took != (10*119+120)*time.Second {
			t.Errorf("failed after %v: not 2 minutes after the last byte", took)
		}
	})
}

func TestIdleTimeoutCountsThroughWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		began := time.Now()
		waits := 0
		for {
			there, err := body.WaitReadable(15 * time.Second)
			if there {
				t.Fatal("something readable")
			}
			if err != nil {
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error(err)
				}
				break
			}
			if waits++; time.Since(began) != time.Duration(waits)*15*time.Second {
				t.Errorf("wait %d ended after %v", waits, time.Since(began))
			}
		}
		if took := time.Since(began); took != 2*time.Minute {
			t.Errorf("failed after %v", took)
		}
	})
}

func TestQuietTimeoutEndsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, wire, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		body.SetQuietTimeout(15 * time.Second)
		began, p := time.Now(), make([]byte, 8)
		for i := range 7 {
			if n, err := body.Read(p); n != 0 || err != ErrNotYet || time.Since(began) != time.Duration(i+1)*15*time.Second {
				t.Fatalf("read %d: %d bytes, %v, after %v", i, n, err, time.Since(began))
			}
		}
		go func() {
			replica.Write([]byte("x"))
			for range 3000 {
				time.Sleep(20 * time.Millisecond)
				replica.Write([]byte("x"))
			}
		}()
		wire.set = 0
		for i := range 3001 {
			if n, err := body.Read(p); n != 1 || err != nil {
				t.Fatalf("byte %d: %d, %v", i, n, err)
			}
		}
		if wire.set > 20 { // a minute, four times the timeout
			t.Errorf("%d deadlines set", wire.set)
		}
		for range 7 {
			body.Read(p)
		}
		began = time.Now()
		if _, err := body.Read(p); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != 15*time.Second {
			t.Errorf("after 2 minutes of silence: %v, %v late", err, time.Since(began)-15*time.Second)
		}
	})
}

// While the reader is busy elsewhere the replica cannot be blamed.
func TestSlowReaderIsNotSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		p := make([]byte, 1)
		for range 5 {
			if there, err := body.WaitReadable(time.Second); there || err != nil {
				t.Fatal(there, err)
			}
			go replica.Write([]byte("x"))
			time.Sleep(10 * time.Minute)
			if n, err := body.Read(p); n != 1 || err != nil {
				t.Fatalf("%d bytes, error %v", n, err)
			}
		}
	})
}

func TestBusyStreamSeldomSetsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, wire, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		go func() {
			for range 3000 {
				time.Sleep(20 * time.Millisecond)
				replica.Write([]byte("x"))
			}
			replica.Close()
		}()
		if got, err := io.ReadAll(body); len(got) != 3000 || err != nil {
			t.Errorf("%d bytes, error %v", len(got), err)
		}
		if wire.set > 5 { // a minute, half of the timeout
			t.Errorf("%d deadlines set", wire.set)
		}
	})
}

// A deadline from a wait must not end a later Read that has none.
func TestWaitLeavesNoDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		if there, err := body.WaitReadable(time.Second); there || err != nil {
			t.Fatal(there, err)
		}
		go func() {
			time.Sleep(time.Hour)
			replica.Write([]byte("x"))
		}()
		if n, err := body.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("%d bytes, error %v", n, err)
		}
	})
}

// A header that has begun is written already. The wait for it to begin, and for
// another after an interim one, has no limit.
func TestHeaderThatDoesNotEnd(t *testing.T) {
	drip := func(replica net.Conn) {
		for {
			time.Sleep(time.Second)
			if _, err := replica.Write([]byte("x")); err != nil {
				return
			}
		}
	}
	for name, f := range map[string]struct {
		script func(net.Conn)
		after  time.Duration
	}{
		"half a status line":      {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 2") }, 10 * time.Second},
		"a byte a second":         {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: "); drip(c) }, 10 * time.Second},
		"all but the last line":   {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n") }, 10 * time.Second},
		"begun late":              {func(c net.Conn) { time.Sleep(time.Hour); io.WriteString(c, "HTTP") }, time.Hour + 10*time.Second},
		"begun after an interim":  {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 103 Hi\r\n\r\nHTTP/1.1 2") }, 10 * time.Second},
		"late after half another": {func(c net.Conn) { lateAfterInterim(c); io.WriteString(c, "HTTP/1.1 2") }, time.Hour + 15*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				replica, ours := net.Pipe()
				var script sync.WaitGroup
				script.Go(func() { f.script(replica) })
				began := time.Now()
				if _, _, err := answerOver(ours, "GET"); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("error %v", err)
				}
				if took := time.Since(began); took != f.after {
					t.Errorf("given up after %v, want %v", took, f.after)
				}
				ours.Close()
				script.Wait()
			})
		})
	}
}

// lateAfterInterim writes an interim answer in two halves, and an hour later.
func lateAfterInterim(c net.Conn) {
	io.WriteString(c, "HTTP/1.1 103 Hi\r\n")
	time.Sleep(5 * time.Second)
	io.WriteString(c, "\r\n")
	time.Sleep(time.Hour)
}

// What was a limit for the header is none for the body.
func TestBodyMayWaitLongerThanTheHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, ours := net.Pipe()
		go func() {
			io.WriteString(replica, "HTTP/1.1 200 OK\r\nContent-")
			time.Sleep(time.Second)
			io.WriteString(replica, "Length: 2\r\n\r\n")
			time.Sleep(time.Hour)
			io.WriteString(replica, "ok")
		}()
		resp, fate, err := answerOver(ours, "GET")
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); string(body) != "ok" || err != nil || fate.released != 1 {
			t.Errorf("body %q, error %v, %+v", body, err, fate)
		}
		ours.Close()
	})
}
