package zmtp

import (
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// FuzzDial reads messages from a peer that sends anything, and checks their bounds.
func FuzzDial(f *testing.F) {
	greeting := slices.Concat([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1, 'N', 'U', 'L', 'L'}, make([]byte, 48))
	ready := []byte("\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB")
	f.Add(slices.Concat(greeting, ready, []byte("\x01\x02kv\x01\x08\x00\x00\x00\x00\x00\x00\x00\x07\x00\x03abc")))
	f.Add(slices.Concat(greeting, ready, []byte("\x04\x0d\x04PING\x00\x64context\x04\x05\x04NEWS\x00\x01x"),
		binary.BigEndian.AppendUint64([]byte{2}, 300), make([]byte, 300)))
	f.Add(slices.Concat(greeting, ready, binary.BigEndian.AppendUint64([]byte{2}, maxPublishedBytes), make([]byte, 1000)))
	f.Add(slices.Concat(greeting, ready, []byte("\x01\x01k\x00\x03abc\x01\x02kv\x00\x01c")))
	f.Add(slices.Concat(greeting, []byte("\x04\x0d\x05ERROR\x06reason")))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		client, server := net.Pipe()
		defer client.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			go func() { // ends when client is closed
				io.Copy(io.Discard, server)
				server.Close()
			}()
			server.Write(sent)
			server.Close()
		}()
		defer func() { client.Close(); <-done }()
		conn, err := Handshake(client, Sub)
		if err != nil {
			return
		}
		if len(sent) < greetingBytes {
			t.Fatal("a handshake without greeting")
		}
		for {
			frames, err := conn.ReadMessageIf(maxPublishedBytes, func(first []byte) (bool, error) { return len(first) != 1, nil })
			if err != nil {
				if cap(conn.message) > 4*len(sent)+4*readStepBytes {
					t.Fatalf("a buffer of %d bytes for %d that were sent", cap(conn.message), len(sent))
				}
				return
			}
			if len(frames) == 0 || len(frames) > maxFrames {
				t.Fatalf("%d frames", len(frames))
			}
		}
	})
}

// stream is a connection whose peer has sent all it sends.
type stream struct {
	net.Conn // nil: nothing else is called
	in       *strings.Reader
}

func (s *stream) Read(b []byte) (int, error)    { return s.in.Read(b) }
func (s *stream) Write(b []byte) (int, error)   { return len(b), nil }
func (s *stream) SetDeadline(t time.Time) error { return nil }

func FuzzAccept(f *testing.F) {
	f.Add(peerGreeting(3, 1, "NULL") + peerReady("SUB") + "\x04\x0C\x09SUBSCRIBEkv\x00\x03\x01kv")
	f.Add(peerGreeting(3, 0, "NULL") + peerReady("XSUB") + "\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00")
	f.Add(peerGreeting(3, 1, "NULL") + peerReady("SUB") + "\x04\x0A\x04PING\x00\x64abc\x02\x00\x00\x00\x00\x00\x00\x01\x00")
	f.Fuzz(func(t *testing.T, sent string) {
		c, err := Handshake(&stream{in: strings.NewReader(sent)}, Pub)
		if err != nil {
			return
		}
		for {
			frames, err := c.ReadMessage()
			if err != nil {
				return
			}
			if len(frames) == 0 || len(frames) > maxFrames {
				t.Fatalf("a message of %d frames", len(frames))
			}
		}
	})
}
