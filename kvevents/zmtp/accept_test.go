package zmtp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// failsafe bounds waits for events that always come.
const failsafe = 20 * time.Second

// serve accepts connections until the test ends and returns the address.
func serve(t *testing.T, own SocketType, handle func(*Conn)) (address string) {
	t.Helper()
	l := listen(t)
	var serving sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				if c, err := Handshake(conn, own); err == nil {
					handle(c)
				}
			})
		}
	})
	return l.Addr().String()
}

// dial connects to a server and sends it bytes.
func dialRaw(t *testing.T, address, bytes string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(failsafe)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, bytes); err != nil {
		t.Fatal(err)
	}
	return conn
}

// expect reads bytes from a connection.
func expect(t *testing.T, conn net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		t.Fatalf("read %q, error %v, want %q", got[:n], err, want)
	}
}

// expectEnd waits until the server has closed a connection. What it sent before is ignored.
func expectEnd(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection stays open")
	}
}

// The greeting of libzmq 4.3, and the same with another version or mechanism.
func peerGreeting(major, minor byte, mechanism string) string {
	padded := mechanism + strings.Repeat("\x00", 20-len(mechanism))
	return "\xFF\x00\x00\x00\x00\x00\x00\x00\x01\x7F" + string([]byte{major, minor}) + padded + strings.Repeat("\x00", 32)
}

// peerReady is the command of a peer of a type, as libzmq sends it.
func peerReady(socketType string) string {
	body := "\x05READY\x0BSocket-Type\x00\x00\x00" + string(byte(len(socketType))) + socketType + "\x08Identity\x00\x00\x00\x00"
	return "\x04" + string(byte(len(body))) + body
}

const (
	ownGreeting = "\xFF\x00\x00\x00\x00\x00\x00\x00\x00\x7F\x03\x01NULL"
	readyPub    = "\x04\x19\x05READY\x0BSocket-Type\x00\x00\x00\x03PUB"
	readyRouter = "\x04\x29\x05READY\x0BSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
)

func TestAccept(t *testing.T) {
	accepted := make(chan bool, 1)
	pub := serve(t, Pub, func(*Conn) { accepted <- true })
	router := serve(t, Router, func(*Conn) { accepted <- true })
	for _, c := range []struct {
		name, address, sent string
		ready               string // what the server sends after its greeting; "": it closes the connection
		accepted            bool
	}{
		{"SUB to PUB", pub, peerGreeting(3, 1, "NULL") + peerReady("SUB"), readyPub, true},
		{"XSUB of ZMTP 3.0 to PUB", pub, peerGreeting(3, 0, "NULL") + peerReady("XSUB"), readyPub, true},
		{"DEALER to ROUTER", router, peerGreeting(3, 1, "NULL") + peerReady("DEALER"), readyRouter, true},
		{"REQ to ROUTER", router, peerGreeting(3, 1, "NULL") + peerReady("REQ"), readyRouter, true},
		{"names in lower case", pub, peerGreeting(3, 1, "NULL") + strings.Replace(peerReady("SUB"), "Socket-Type", "socket-type", 1), readyPub,
			true},
		{"DEALER to PUB", pub, peerGreeting(3, 1, "NULL") + peerReady("DEALER"), readyPub, false},
		{"SUB to ROUTER", router, peerGreeting(3, 1, "NULL") + peerReady("SUB"), readyRouter, false},
		{"no type", pub, peerGreeting(3, 1, "NULL") + "\x04\x06\x05READY", readyPub, false},
		{"another command", pub, peerGreeting(3, 1, "NULL") + strings.Replace(peerReady("SUB"), "READY", "HELLO", 1), readyPub, false},
		{"a message in place of a command", pub, peerGreeting(3, 1, "NULL") + "\x00" + peerReady("SUB")[1:], readyPub, false},
		{"a property longer than the command", pub, peerGreeting(3, 1, "NULL") + "\x04\x19\x05READY\x0BSocket-Type\xFF\xFF\xFF\xFFSUB", readyPub,
			false},
		{"a name longer than the command", pub, peerGreeting(3, 1, "NULL") + "\x04\x03\x05RE", readyPub, false},
		{"an empty command", pub, peerGreeting(3, 1, "NULL") + "\x04\x00", readyPub, false},
		{"security", pub, peerGreeting(3, 1, "CURVE"), "", false},
		{"ZMTP 2", pub, peerGreeting(2, 0, "NULL"), "", false},
		{"HTTP", pub, "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nUser-Agent: some client\r\n\r\n", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := dialRaw(t, c.address, c.sent)
			expect(t, conn, ownGreeting+strings.Repeat("\x00", 64-len(ownGreeting))+c.ready)
			expectEnd(t, conn)
			select {
			case <-accepted:
				if !c.accepted {
					t.Error("the peer was accepted")
				}
			default:
				if c.accepted {
					t.Error("the peer was not accepted")
				}
			}
		})
	}
}

func TestAcceptedMessages(t *testing.T) {
	type result struct {
		message string // frames, joined by a bar
		err     bool
	}
	long := strings.Repeat("x", 300)
	results := make(chan result)
	address := serve(t, Pub, func(c *Conn) {
		for {
			frames, err := c.ReadMessage()
			results <- result{string(bytes.Join(frames, []byte("|"))), err != nil}
			if err != nil {
				return
			}
		}
	})
	for _, c := range []struct {
		name, sent string
		want       []result
	}{
		{"frames", "\x01\x00\x01\x02ab\x00\x01c", []result{{"|ab|c", false}}},
		{"a long frame", "\x02\x00\x00\x00\x00\x00\x00\x01\x2C" + long, []result{{long, false}}},
		{"subscription of ZMTP 3.0", "\x00\x03\x01kv", []result{{"\x01kv", false}}},
		{"subscription of ZMTP 3.1", "\x04\x0C\x09SUBSCRIBEkv\x04\x09\x06CANCELkv", []result{{"\x01kv", false}, {"\x00kv", false}}},
		{"unknown command", "\x04\x04\x03NEW\x00\x01a", []result{{"a", false}}},
		{"error", "\x04\x07\x05ERROR\x00", []result{{"", true}}},
		{"unknown flag", "\x08\x01a", []result{{"", true}}},
		{"too long", "\x02\x00\x00\x01\x00\x00\x00\x00\x00", []result{{"", true}}},
		{"too many frames", strings.Repeat("\x01\x01a", 9), []result{{"", true}}},
		{"truncated ping", "\x04\x06\x04PING\x00", []result{{"", true}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := dialRaw(t, address, peerGreeting(3, 1, "NULL")+peerReady("SUB")+c.sent)
			for _, want := range c.want {
				if got := <-results; got != want {
					t.Errorf("got %+v, want %+v", got, want)
				}
			}
			conn.Close()
			if !c.want[len(c.want)-1].err {
				if got := <-results; !got.err {
					t.Errorf("got %+v, want the end", got)
				}
			}
		})
	}
}

// Of a message that is not wanted, only the first frame is kept.
func TestReadMessageIf(t *testing.T) {
	type result struct {
		message string // frames, joined by a bar
		err     bool
	}
	results := make(chan result)
	kept := make(chan int, 1)
	address := serve(t, Sub, func(c *Conn) {
		frames, err := c.ReadMessageIf(4, func(first []byte) (bool, error) {
			if string(first) == "bad" {
				return false, errors.New("not wanted at all")
			}
			return string(first) == "yes", nil
		})
		kept <- cap(c.message)
		results <- result{string(bytes.Join(frames, []byte("|"))), err != nil}
	})
	long := "\x02\x00\x00\x00\x00\x00\x10\x00\x00" + strings.Repeat("x", 1<<20)
	for _, c := range []struct {
		name, sent string
		want       result
	}{
		{"the first one", "\x01\x03yes\x00\x01a", result{"yes|a", false}},
		{"one after others", "\x00\x02no" + "\x01\x02no" + long + "\x01\x00\x01\x01a\x00\x01b" + "\x01\x03yes\x01\x01c\x00\x00",
			result{"yes|c|", false}},
		{"a command between", "\x01\x02no\x04\x04\x03NEW\x00\x01a\x00\x03yes", result{"yes", false}},
		{"a long first frame", "\x00\x05yes..", result{"", true}},
		{"an error", "\x01\x03bad\x00\x03yes", result{"", true}},
		{"too many frames", "\x01\x02no" + strings.Repeat("\x01\x01a", 8), result{"", true}},
		{"the end in a frame", "\x01\x02no\x00\x05a", result{"", true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := dialRaw(t, address, peerGreeting(3, 1, "NULL")+peerReady("PUB")+c.sent)
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if n := <-kept; n > 1<<10 {
				t.Errorf("a buffer of %d bytes", n)
			}
			if got := <-results; got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestPing(t *testing.T) {
	address := serve(t, Router, func(c *Conn) { _, _ = c.ReadMessage() })
	conn := dialRaw(t, address, peerGreeting(3, 1, "NULL")+peerReady("DEALER"))
	expect(t, conn, ownGreeting+strings.Repeat("\x00", 64-len(ownGreeting))+readyRouter)
	if _, err := io.WriteString(conn, "\x04\x0A\x04PING\x00\x64abc"); err != nil {
		t.Fatal(err)
	}
	expect(t, conn, "\x04\x08\x04PONGabc")
}

func TestAcceptedWrite(t *testing.T) {
	long := strings.Repeat("x", 256)
	address := serve(t, Pub, func(c *Conn) {
		for _, frames := range [][][]byte{{nil, []byte("ab"), []byte(long)}, {[]byte("c")}} {
			if err := c.WriteMessage(frames...); err != nil {
				t.Error(err)
			}
		}
	})
	conn := dialRaw(t, address, peerGreeting(3, 1, "NULL")+peerReady("SUB"))
	expect(t, conn, ownGreeting+strings.Repeat("\x00", 64-len(ownGreeting))+readyPub+
		"\x01\x00"+"\x01\x02ab"+"\x02\x00\x00\x00\x00\x00\x00\x01\x00"+long+"\x00\x01c")
	expectEnd(t, conn)
}
