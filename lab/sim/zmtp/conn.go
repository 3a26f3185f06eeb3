// Package zmtp is the side of a ZeroMQ socket that listens: ZMTP 3.1 without security, over
// TCP. What a socket does with its messages is up to the caller.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	handshakeTimeout = 10 * time.Second

	// Peers send requests and the topics of subscriptions.
	maxFrameBytes    = 64 << 10
	maxMessageFrames = 8
)

// Flags of a frame.
const (
	flagMore    = 1 << iota // more frames of the message follow
	flagLong                // the size has eight bytes
	flagCommand             // of the protocol, not of the application
)

// First byte of the message by which a peer subscribes to the topics that begin with the rest,
// or cancels that.
const (
	Cancel    = 0
	Subscribe = 1
)

// peersOf are the types of the sockets that may connect to one of a type.
var peersOf = map[string][]string{
	"PUB":    {"SUB", "XSUB"},
	"ROUTER": {"REQ", "DEALER", "ROUTER"},
}

// Conn is a connection after its handshake. One goroutine may read while others write.
type Conn struct {
	conn net.Conn
	in   *bufio.Reader

	mu  sync.Mutex // held for a write
	out []byte     // reused
}

// newConn greets the peer on conn for a socket of a type. It takes handshakeTimeout at most.
func newConn(conn net.Conn, socketType string) (*Conn, error) {
	c := &Conn{conn: conn, in: bufio.NewReaderSize(conn, 1024)}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	if err := c.exchangeGreetings(); err != nil {
		return nil, err
	}
	if err := c.exchangeReady(socketType); err != nil {
		return nil, err
	}
	return c, conn.SetDeadline(time.Time{})
}

// A greeting is a signature of ten bytes, the version, the name of the security mechanism in
// twenty bytes, and padding.
const (
	greetingBytes  = 64
	versionAt      = 10
	mechanismAt    = 12
	mechanismBytes = 20
)

func greeting() []byte {
	g := make([]byte, greetingBytes)
	g[0], g[9] = 0xFF, 0x7F
	g[versionAt], g[versionAt+1] = 3, 1
	copy(g[mechanismAt:], "NULL")
	return g
}

func (c *Conn) exchangeGreetings() error {
	own := greeting()
	if _, err := c.conn.Write(own); err != nil {
		return err
	}
	var peer [greetingBytes]byte
	if _, err := io.ReadFull(c.in, peer[:]); err != nil {
		return err
	}
	switch mechanism := peer[mechanismAt : mechanismAt+mechanismBytes]; {
	case peer[0] != 0xFF || peer[9]&1 == 0:
		return errors.New("the peer does not speak ZMTP")
	case peer[versionAt] < 3:
		return fmt.Errorf("the peer speaks ZMTP %d, 3 is needed", peer[versionAt])
	case !bytes.Equal(mechanism, own[mechanismAt:mechanismAt+mechanismBytes]):
		return fmt.Errorf("the peer wants the security mechanism %q, NULL is needed", bytes.TrimRight(mechanism, "\x00"))
	}
	return nil
}

// exchangeReady tells the type of this socket and checks that of the peer.
func (c *Conn) exchangeReady(socketType string) error {
	ready := appendProperty([]byte("\x05READY"), "Socket-Type", socketType)
	if socketType == "ROUTER" {
		ready = appendProperty(ready, "Identity", "")
	}
	if err := c.writeFrames(flagCommand, ready); err != nil {
		return err
	}
	flags, body, err := c.readFrame()
	if err != nil {
		return err
	}
	name, properties, err := cutName(body)
	if err != nil {
		return err
	}
	if flags != flagCommand || name != "READY" {
		return fmt.Errorf("the peer sent %q, READY is needed", name)
	}
	peer, err := findProperty(properties, "Socket-Type")
	if err != nil {
		return err
	}
	for _, allowed := range peersOf[socketType] {
		if peer == allowed {
			return nil
		}
	}
	return fmt.Errorf("a socket of type %q cannot connect to one of type %s", peer, socketType)
}

// appendProperty appends a property of a READY command.
func appendProperty(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// findProperty returns a property of a READY command; "" if it is missing.
func findProperty(properties []byte, wanted string) (value string, err error) {
	for len(properties) > 0 {
		name, rest, err := cutName(properties)
		if err != nil {
			return "", err
		}
		if len(rest) < 4 || uint32(len(rest)-4) < binary.BigEndian.Uint32(rest) {
			return "", errTruncated
		}
		end := 4 + int(binary.BigEndian.Uint32(rest))
		// The names' case does not count.
		if bytes.EqualFold([]byte(name), []byte(wanted)) {
			value = string(rest[4:end])
		}
		properties = rest[end:]
	}
	return value, nil
}

var errTruncated = errors.New("a command of the peer is truncated")

// cutName cuts the name of a command or a property from what follows it.
func cutName(b []byte) (name string, rest []byte, err error) {
	if len(b) == 0 || len(b)-1 < int(b[0]) {
		return "", nil, errTruncated
	}
	end := 1 + int(b[0])
	return string(b[1:end]), b[end:], nil
}

// ReadMessage returns the frames of the next message. A subscription, which is a command in
// ZMTP 3.1, is returned as the message of one frame that it is in ZMTP 3.0.
func (c *Conn) ReadMessage() (frames [][]byte, err error) {
	for {
		flags, body, err := c.readFrame()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			subscription, err := c.handleCommand(body)
			if err != nil {
				return nil, err
			}
			if subscription != nil {
				return [][]byte{subscription}, nil
			}
			continue
		}
		if frames = append(frames, body); len(frames) > maxMessageFrames {
			return nil, fmt.Errorf("a message of the peer exceeds %d frames", maxMessageFrames)
		}
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// handleCommand answers a PING and ignores commands that it does not know.
func (c *Conn) handleCommand(body []byte) (subscription []byte, err error) {
	name, data, err := cutName(body)
	if err != nil {
		return nil, err
	}
	switch name {
	case "SUBSCRIBE":
		return append([]byte{Subscribe}, data...), nil
	case "CANCEL":
		return append([]byte{Cancel}, data...), nil
	case "PING":
		if len(data) < 2 {
			return nil, errTruncated
		}
		return nil, c.writeFrames(flagCommand, append([]byte("\x04PONG"), data[2:]...)) // without the time to live
	case "ERROR":
		return nil, errors.New("the peer sent an error")
	}
	return nil, nil
}

// readFrame reads one frame.
func (c *Conn) readFrame() (flags byte, body []byte, err error) {
	if flags, err = c.in.ReadByte(); err != nil {
		return 0, nil, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("unknown flags %#x of a frame", flags)
	}
	size := make([]byte, 1, 8)
	if flags&flagLong != 0 {
		size = size[:8]
	}
	if _, err := io.ReadFull(c.in, size); err != nil {
		return 0, nil, err
	}
	n := uint64(size[0])
	if flags&flagLong != 0 {
		n = binary.BigEndian.Uint64(size)
	}
	if n > maxFrameBytes {
		return 0, nil, fmt.Errorf("a frame of the peer has %d bytes, at most %d are allowed", n, maxFrameBytes)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(c.in, body)
	return flags &^ flagLong, body, err
}

// WriteMessage sends a message. It blocks while the peer's and the kernel's buffers are full,
// until the connection is closed.
func (c *Conn) WriteMessage(frames ...[]byte) error { return c.writeFrames(0, frames...) }

// writeFrames sends frames as one message, or one frame as a command.
func (c *Conn) writeFrames(flags byte, frames ...[]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = c.out[:0]
	for i, body := range frames {
		flags := flags
		if i < len(frames)-1 {
			flags |= flagMore
		}
		if n := len(body); n <= 0xFF {
			c.out = append(c.out, flags, byte(n))
		} else {
			c.out = binary.BigEndian.AppendUint64(append(c.out, flags|flagLong), uint64(n))
		}
		c.out = append(c.out, body...)
	}
	_, err := c.conn.Write(c.out)
	return err
}

// Close closes the connection, so that reads and writes end.
func (c *Conn) Close() error { return c.conn.Close() }
