// Package zmtp is a connection between two ZeroMQ sockets: ZMTP over TCP (RFC 23, RFC 37) without
// authentication. The end of a subscriber is of version 3.0, that of a publisher of version 3.1; either
// accepts peers of both, and either may dial. What a socket does with its messages is up to the caller.
package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	maxFrames         = 8        // of a message that is received
	maxPublishedBytes = 16 << 20 // of a message that a publisher sends
	maxRequestBytes   = 64 << 10 // of a message that a publisher receives
	maxKeptBytes      = 1 << 20  // of the message buffer between messages
	readStepBytes     = 64 << 10

	maxCommandBytes = 1 << 10 // of those that are read; longer ones are passed over

	connectTimeout   = 5 * time.Second
	handshakeTimeout = 5 * time.Second
	writeTimeout     = 5 * time.Second // of a subscriber's end
)

// keepAlive finds a peer that is gone: an idle publisher sends nothing.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Flags of a frame.
const (
	flagMore    = 1 << iota // another frame of the message follows
	flagLong                // the size has eight bytes instead of one
	flagCommand             // for the connection itself
)

// First byte of the message by which a peer subscribes to the topics that begin with the rest, or cancels
// that. It is a message of version 3.0, which later versions accept as well.
const (
	Cancel    = 0
	Subscribe = 1
)

// SocketType is the type of a socket, as in ZeroMQ.
type SocketType string

// The types that our end can have.
const (
	Sub    SocketType = "SUB"
	Dealer SocketType = "DEALER"
	Pub    SocketType = "PUB"
	Router SocketType = "ROUTER"
)

// peers lists the types of sockets that one of each type can be connected to.
var peers = map[SocketType][]string{
	Sub:    {"PUB", "XPUB"},
	Dealer: {"ROUTER", "REP", "DEALER"},
	Pub:    {"SUB", "XSUB"},
	Router: {"REQ", "DEALER", "ROUTER"},
}

// isPublisher reports whether an end of this type is that of a publisher, which never gives up on a peer that does not read.
func (t SocketType) isPublisher() bool { return t == Pub || t == Router }

// Conn is a connection after its handshake. One goroutine may read while others write.
type Conn struct {
	net.Conn
	own      SocketType
	reader   *bufio.Reader
	maxBytes int // of a message that is received

	message []byte // content of all frames of the last message
	frames  [maxFrames][]byte
	command []byte

	writing sync.Mutex
	out     []byte // what was written last; its memory is reused
}

// Dial connects an end of type Sub or Dealer to an endpoint tcp://HOST:PORT, where the control of a net.Dialer allows it (nil:
// everywhere). The connection is closed when ctx ends or release is called.
func Dial(
	ctx context.Context, endpoint string, own SocketType, control func(network, address string, _ syscall.RawConn) error,
) (c *Conn, release func(), err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return nil, nil, fmt.Errorf("connect to %s: not of the form tcp://HOST:PORT", endpoint)
	}
	dialer := net.Dialer{Timeout: connectTimeout, Control: control}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	release = func() {
		stop()
		conn.Close()
	}
	c, err = Handshake(conn, own)
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	return c, release, nil
}

// Handshake greets the peer on conn and checks what it is. It returns after handshakeTimeout at the
// latest, and leaves conn open. A connection over TCP gets keep-alives.
func Handshake(conn net.Conn, own SocketType) (*Conn, error) {
	if tcp, ok := conn.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}); ok {
		if err := tcp.SetKeepAliveConfig(keepAlive); err != nil {
			return nil, err
		}
	}
	c := &Conn{Conn: conn, own: own, reader: bufio.NewReaderSize(conn, 32<<10), maxBytes: maxPublishedBytes}
	if own.isPublisher() {
		c.maxBytes = maxRequestBytes
	}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	if err := c.greet(); err != nil {
		return nil, fmt.Errorf("ZeroMQ handshake: %w", err)
	}
	return c, conn.SetDeadline(time.Time{})
}

const greetingBytes = 64

// greet exchanges greetings and READY commands.
func (c *Conn) greet() error {
	var greeting [greetingBytes]byte
	greeting[0], greeting[9] = 0xff, 0x7f // signature
	greeting[10] = 3                      // version
	if c.own.isPublisher() {
		greeting[11] = 1
	}
	copy(greeting[12:32], "NULL") // no authentication
	if _, err := c.Write(greeting[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.reader, greeting[:11]); err != nil {
		return err
	}
	if greeting[0] != 0xff || greeting[9]&1 == 0 {
		return errors.New("the peer does not speak ZeroMQ")
	}
	if greeting[10] < 3 {
		return fmt.Errorf("the peer speaks version %d of the protocol, version 3 is needed", greeting[10])
	}
	if _, err := io.ReadFull(c.reader, greeting[11:]); err != nil {
		return err
	}
	if mechanism := bytes.TrimRight(greeting[12:32], "\x00"); string(mechanism) != "NULL" {
		return fmt.Errorf("the peer wants authentication by %.20q, which is not supported", mechanism)
	}
	ready := appendProperty([]byte("\x05READY"), "Socket-Type", string(c.own))
	if c.own == Dealer || c.own == Router {
		ready = appendProperty(ready, "Identity", "")
	}
	if err := c.writeFrames(flagCommand, ready); err != nil {
		return err
	}
	return c.readReady()
}

// appendProperty appends a property of a READY command.
func appendProperty(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// readReady reads the peer's READY command.
func (c *Conn) readReady() error {
	flags, size, err := c.readFrameHeader()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 {
		return errors.New("the peer sends a message before it is ready")
	}
	name, body, err := c.readCommand(size)
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
	case "ERROR":
		return newPeerError(body)
	default:
		return errors.New("the peer sends another command than READY")
	}
	peer := findProperty(body, "Socket-Type")
	if !slices.Contains(peers[c.own], string(peer)) {
		return fmt.Errorf("the peer is a socket of type %.20q, want %s: is this the right port?", peer, strings.Join(peers[c.own], " or "))
	}
	return nil
}

// newPeerError returns the error that an ERROR command reports.
func newPeerError(body []byte) error {
	reason := body[min(1, len(body)):] // after its length
	return fmt.Errorf("refused by the peer: %.100q", reason)
}

// findProperty returns a property of a READY command, nil if it has none.
func findProperty(b []byte, name string) []byte {
	for len(b) > 0 {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return nil
		}
		key, size := b[1:1+n], binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return nil
		}
		if bytes.EqualFold(key, []byte(name)) {
			return b[:size]
		}
		b = b[size:]
	}
	return nil
}

// WriteMessage sends a message of one or more frames. It blocks while the peer's and the kernel's buffers are
// full: for writeTimeout at most if this end is a subscriber's, else until the connection is closed.
func (c *Conn) WriteMessage(frames ...[]byte) error { return c.writeFrames(0, frames...) }

// writeFrames sends frames as one message, or one frame as a command.
func (c *Conn) writeFrames(flags byte, frames ...[]byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	b := c.out[:0]
	for i, frame := range frames {
		flags := flags
		if i < len(frames)-1 {
			flags |= flagMore
		}
		if n := len(frame); n > 255 {
			b = binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(n))
		} else {
			b = append(b, flags, byte(n))
		}
		b = append(b, frame...)
	}
	if c.out = b; !c.own.isPublisher() {
		if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
	}
	_, err := c.Write(b)
	return err
}

// WaitReadable blocks until there is something to read, and reports false if there is nothing
// until a time; the zero time means no limit.
func (c *Conn) WaitReadable(until time.Time) (readable bool, err error) {
	if err := c.SetReadDeadline(until); err != nil {
		return false, err
	}
	_, err = c.reader.Peek(1)
	if errors.Is(err, os.ErrDeadlineExceeded) && !until.IsZero() {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, c.SetReadDeadline(time.Time{})
}

// ReadMessage returns the frames of the next message, which are valid until the next call. It
// responds to heartbeats meanwhile. A subscription, which is a command in version 3.1, is returned as
// the message of one frame that it is in version 3.0.
func (c *Conn) ReadMessage() ([][]byte, error) { return c.ReadMessageIf(c.maxBytes, nil) }

// ReadMessageIf is ReadMessage for the next message whose first frame is wanted (nil: each one is), until wanted returns an
// error. The first frames may have maxFirstBytes, and of messages that are not wanted nothing else is kept in memory.
func (c *Conn) ReadMessageIf(maxFirstBytes int, wanted func(first []byte) (bool, error)) ([][]byte, error) {
	if c.message = c.message[:0]; cap(c.message) > maxKeptBytes {
		c.message = nil
	}
	var ends [maxFrames]int
	for n, skipped := 0, false; ; {
		flags, size, err := c.readFrameHeader()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			subscription, err := c.handleCommand(size)
			if err != nil {
				return nil, err
			}
			if subscription != nil {
				c.frames[0] = subscription
				return c.frames[:1], nil
			}
			continue
		}
		switch {
		case n == maxFrames:
			return nil, fmt.Errorf("a message of more than %d frames", maxFrames)
		case n == 0 && size > maxFirstBytes:
			return nil, fmt.Errorf("a message whose first frame has %d bytes, the limit is %d", size, maxFirstBytes)
		case size > c.maxBytes-len(c.message):
			return nil, fmt.Errorf("a message of more than %d bytes", c.maxBytes)
		case skipped:
			if _, err := c.reader.Discard(size); err != nil {
				return nil, noEOF(err)
			}
		default:
			if c.message, err = appendBytes(c.message, c.reader, size); err != nil {
				return nil, err
			}
		}
		if n == 0 && wanted != nil {
			isWanted, err := wanted(c.message)
			if err != nil {
				return nil, err
			}
			skipped = !isWanted
		}
		ends[n] = len(c.message)
		if n++; flags&flagMore > 0 {
			continue
		}
		if skipped {
			n, skipped, c.message = 0, false, c.message[:0]
			continue
		}
		start := 0
		for i, end := range ends[:n] {
			c.frames[i] = c.message[start:end:end]
			start = end
		}
		return c.frames[:n], nil
	}
}

// readFrameHeader reads the flags and the size of a frame.
func (c *Conn) readFrameHeader() (flags byte, size int, err error) {
	flags, err = c.reader.ReadByte()
	if err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, 0, fmt.Errorf("a frame with the flags %#x", flags)
	}
	var b [8]byte
	length := b[7:]
	if flags&flagLong != 0 {
		length = b[:]
	}
	if _, err := io.ReadFull(c.reader, length); err != nil {
		return 0, 0, noEOF(err)
	}
	declared := binary.BigEndian.Uint64(b[:])
	if declared > uint64(c.maxBytes) {
		return 0, 0, fmt.Errorf("a frame of %d bytes, the limit is %d", declared, c.maxBytes)
	}
	return flags, int(declared), nil
}

// handleCommand reads a command of size bytes and responds to PING. It returns that of a subscription as
// a message of version 3.0. Commands that are not known mean nothing.
func (c *Conn) handleCommand(size int) (subscription []byte, err error) {
	if size > maxCommandBytes {
		_, err := c.reader.Discard(size)
		return nil, noEOF(err)
	}
	name, body, err := c.readCommand(size)
	if err != nil {
		return nil, err
	}
	switch string(name) {
	case "SUBSCRIBE":
		return append([]byte{Subscribe}, body...), nil
	case "CANCEL":
		return append([]byte{Cancel}, body...), nil
	case "PING":
		if len(body) < 2 {
			return nil, errors.New("a PING command without time to live")
		}
		return nil, c.writeFrames(flagCommand, append([]byte("\x04PONG"), body[2:]...))
	case "ERROR":
		return nil, newPeerError(body)
	}
	return nil, nil
}

// readCommand reads a command of size bytes. name and body are valid until the next call.
func (c *Conn) readCommand(size int) (name, body []byte, err error) {
	if size > maxCommandBytes {
		return nil, nil, fmt.Errorf("a command of %d bytes, the limit is %d", size, maxCommandBytes)
	}
	if c.command, err = appendBytes(c.command[:0], c.reader, size); err != nil {
		return nil, nil, err
	}
	if size == 0 || 1+int(c.command[0]) > size {
		return nil, nil, errors.New("a command without name")
	}
	n := 1 + int(c.command[0])
	return c.command[1:n], c.command[n:], nil
}

// appendBytes appends the next n bytes of r to b. It reserves memory as they arrive: at most
// twice of what b has by then and one step.
func appendBytes(b []byte, r io.Reader, n int) ([]byte, error) {
	for n > 0 {
		step := min(n, max(readStepBytes, len(b)))
		start := len(b)
		b = slices.Grow(b, step)[:start+step]
		if _, err := io.ReadFull(r, b[start:]); err != nil {
			return b[:start], noEOF(err)
		}
		n -= step
	}
	return b, nil
}

// noEOF turns an end of the input within a frame into an error.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
