package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// packMessage encodes the frames of a message.
func packMessage(frames ...[]byte) (b []byte) {
	for i, frame := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = append(b, packFrame(flags, frame)...)
	}
	return b
}

func packFrame(flags byte, body []byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body))), body...)
}

// greeting is that of a server.
func greeting(major byte, mechanism string) []byte {
	b := make([]byte, greetingBytes)
	b[0], b[8], b[9], b[10], b[11] = 0xff, 1, 0x7f, major, 1
	copy(b[12:32], mechanism)
	return b
}

// dialServer connects to a server that sends bytes whatever it receives, and closes the
// connection when the client does.
func dialServer(t *testing.T, own SocketType, sent ...[]byte) (*Conn, error) {
	t.Helper()
	ln := listen(t)
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	serving.Go(func() {
		defer ln.Close()
		conn, err := ln.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		for _, b := range sent {
			conn.Write(b)
		}
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn)
	})
	c, release, err := Dial(t.Context(), "tcp://"+ln.Addr().String(), own, nil)
	if err == nil {
		t.Cleanup(release)
	}
	return c, err
}

func TestDial(t *testing.T) {
	ready := func(socket string) []byte {
		return packFrame(4, appendProperty(appendProperty([]byte("\x05READY"), "Identity", ""), "socket-TYPE", socket))
	}
	for name, c := range map[string]struct {
		own  SocketType
		sent []byte
		err  string
	}{
		"PUB":           {Sub, slices.Concat(greeting(3, "NULL"), ready("PUB")), ""},
		"XPUB":          {Sub, slices.Concat(greeting(3, "NULL"), ready("XPUB")), ""},
		"ROUTER":        {Dealer, slices.Concat(greeting(3, "NULL"), ready("ROUTER")), ""},
		"later version": {Sub, slices.Concat(greeting(4, "NULL"), ready("PUB")), ""},
		"version 2":     {Sub, greeting(1, ""), "version 3 is needed"},
		"HTTP":          {Sub, []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak ZeroMQ"},
		"CURVE":         {Sub, greeting(3, "CURVE"), `authentication by "CURVE"`},
		"ROUTER for SUB": {Sub, slices.Concat(greeting(3, "NULL"), ready("ROUTER")),
			`a socket of type "ROUTER", want PUB or XPUB: is this the right port?`},
		"PUB for DEALER": {Dealer, slices.Concat(greeting(3, "NULL"), ready("PUB")), `a socket of type "PUB", want ROUTER`},
		"no type":        {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05READY"))), `a socket of type ""`},
		"invalid property": {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB"))),
			`a socket of type ""`},
		"short property": {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05READY\xffSocket-Type"))), `a socket of type ""`},
		"ERROR": {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05ERROR\x06denied"))),
			`refused by the peer: "denied"`},
		"empty ERROR":     {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05ERROR"))), "refused by the peer"},
		"other command":   {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, []byte("\x05HELLO"))), "another command than READY"},
		"message":         {Sub, slices.Concat(greeting(3, "NULL"), packFrame(0, []byte("x"))), "a message before it is ready"},
		"long command":    {Sub, slices.Concat(greeting(3, "NULL"), packFrame(4, make([]byte, maxCommandBytes+1))), "the limit is"},
		"no greeting":     {Sub, nil, "EOF"},
		"half a greeting": {Sub, greeting(3, "NULL")[:40], "EOF"},
		"no command":      {Sub, greeting(3, "NULL"), "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := dialServer(t, c.own, c.sent)
			if (err == nil) != (c.err == "") || !strings.Contains(fmt.Sprint(err), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
		})
	}
}

func TestReadMessage(t *testing.T) {
	random := bytes.Repeat([]byte("0123456789abcdef"), 70_000) // more than is kept
	messages := [][][]byte{
		{[]byte("topic"), make([]byte, 8), random[:255]},
		{nil},
		{random[:256], random[:300], random},
		slices.Repeat([][]byte{[]byte("x")}, maxFrames),
		{random[:100_000], nil, []byte("end")},
	}
	sent := [][]byte{greeting(3, "NULL"), packFrame(4, appendProperty([]byte("\x05READY"), "Socket-Type", "PUB"))}
	for _, m := range messages {
		sent = append(sent, packMessage(m...))
	}
	// A short frame may have a long size, and commands may stand between the frames of a message.
	sent = append(sent, slices.Concat(binary.BigEndian.AppendUint64([]byte{3}, 1), []byte("a"), packFrame(4, []byte("\x04NEWS")),
		packFrame(0, []byte("b"))))
	messages = append(messages, [][]byte{[]byte("a"), []byte("b")})
	c, err := dialServer(t, Sub, sent...)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range messages {
		got, err := c.ReadMessage()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("message %d: %d frames", i, len(got))
		}
	}
	if _, err := c.ReadMessage(); err != io.EOF {
		t.Errorf("error %v at the end", err)
	}
	if cap(c.message) > maxKeptBytes {
		t.Errorf("a buffer of %d bytes is kept", cap(c.message))
	}
}

func TestReadMessageBounds(t *testing.T) {
	half := packFrame(1, make([]byte, maxPublishedBytes/2))
	for name, c := range map[string]struct {
		sent [][]byte
		err  string
	}{
		"frame":                 {[][]byte{binary.BigEndian.AppendUint64([]byte{2}, maxPublishedBytes+1)}, "a frame of 16777217 bytes"},
		"sign":                  {[][]byte{binary.BigEndian.AppendUint64([]byte{2}, 1<<63)}, "the limit is"},
		"message":               {[][]byte{half, half, packFrame(0, []byte("x"))}, "a message of more than 16777216 bytes"},
		"frames":                {[][]byte{bytes.Repeat(packFrame(1, nil), maxFrames+1)}, "more than 8 frames"},
		"declared only":         {[][]byte{binary.BigEndian.AppendUint64([]byte{2}, maxPublishedBytes), make([]byte, 100)}, "unexpected EOF"},
		"cut in header":         {[][]byte{{2, 0, 0}}, "unexpected EOF"},
		"cut in command":        {[][]byte{{4, 20, 4}}, "unexpected EOF"},
		"cut in a long command": {[][]byte{binary.BigEndian.AppendUint64([]byte{6}, 5000), make([]byte, 100)}, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			ready := packFrame(4, appendProperty([]byte("\x05READY"), "Socket-Type", "PUB"))
			conn, err := dialServer(t, Sub, append([][]byte{greeting(3, "NULL"), ready}, c.sent...)...)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.ReadMessage(); !strings.Contains(fmt.Sprint(err), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if name == "declared only" && cap(conn.message) > 2*readStepBytes {
				t.Errorf("%d bytes allocated for 100", cap(conn.message))
			}
		})
	}
}

// A wait that ends without a message loses nothing of one that comes later.
func TestWaitReadable(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	c := &Conn{Conn: ours, reader: bufio.NewReader(ours), maxBytes: maxPublishedBytes}
	defer c.Close()
	for range 2 {
		if readable, err := c.WaitReadable(time.Now().Add(10 * time.Millisecond)); readable || err != nil {
			t.Fatalf("nothing was sent: %v, %v", readable, err)
		}
	}
	go theirs.Write([]byte("\x00\x05hello"))
	if readable, err := c.WaitReadable(time.Time{}); !readable || err != nil {
		t.Fatalf("a message was sent: %v, %v", readable, err)
	}
	if frames, err := c.ReadMessage(); err != nil || len(frames) != 1 || string(frames[0]) != "hello" {
		t.Errorf("got %q, %v", frames, err)
	}
	theirs.Close()
	if readable, err := c.WaitReadable(time.Now().Add(time.Minute)); readable || err == nil {
		t.Errorf("closed: %v, %v", readable, err)
	}
}
