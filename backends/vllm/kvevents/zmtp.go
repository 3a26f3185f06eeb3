package kvevents

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
	"time"
)

// ZMTP is the protocol of ZeroMQ sockets over TCP (RFC 23, RFC 37). This is a client's side of
// version 3.0 without authentication, which all peers of versions 3.0 and later accept.

const (
	maxFrameBytes   = 16 << 20
	maxMessageBytes = 16 << 20
	maxFrames       = 8       // of one message
	maxKeptBytes    = 1 << 20 // of the message buffer between messages
	readStepBytes   = 64 << 10

	maxCommandBytes = 1 << 10 // of those that are read; longer ones are passed over

	connectTimeout   = 5 * time.Second
	handshakeTimeout = 5 * time.Second
	writeTimeout     = 5 * time.Second
)

// keepAlive detects a peer whose machine is gone within half a minute. An idle publisher sends
// nothing, so that silence alone means nothing.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Flags of a frame.
const (
	flagMore    = 1 << iota // another frame of the message follows
	flagLong                // the size has eight bytes instead of one
	flagCommand             // for the connection itself
)

// socketType is the type of our end, as in ZeroMQ.
type socketType string

const (
	typeSub    socketType = "SUB"
	typeDealer socketType = "DEALER"
)

// peers lists the types that our end can be connected to.
func (t socketType) peers() []string {
	if t == typeSub {
		return []string{"PUB", "XPUB"}
	}
	return []string{"ROUTER", "REP", "DEALER"}
}

// zmtpConn is a connection to a ZeroMQ socket. One goroutine at a time may use it.
type zmtpConn struct {
	net.Conn
	reader *bufio.Reader

	message []byte // content of all frames of the last message
	frames  [maxFrames][]byte
	command []byte
}

// dialZMTP connects to an endpoint tcp://HOST:PORT. The connection is closed when ctx ends or
// release is called.
func dialZMTP(ctx context.Context, endpoint string, own socketType) (c *zmtpConn, release func(), err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return nil, nil, fmt.Errorf("connect to %s: not of the form tcp://HOST:PORT", endpoint)
	}
	dialer := net.Dialer{Timeout: connectTimeout, KeepAliveConfig: keepAlive}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	release = closeWith(ctx, conn)
	c, err = newZMTPConn(conn, own)
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	return c, release, nil
}

// closeWith closes conn when ctx ends or release is called, which returns when it is closed.
func closeWith(ctx context.Context, conn net.Conn) (release func()) {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		conn.Close()
		close(closed)
	})
	return func() {
		if stop() {
			conn.Close()
		} else {
			<-closed
		}
	}
}

// newZMTPConn greets the peer and checks what it is.
func newZMTPConn(conn net.Conn, own socketType) (*zmtpConn, error) {
	c := &zmtpConn{Conn: conn, reader: bufio.NewReaderSize(conn, 32<<10)}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	if err := c.handshake(own); err != nil {
		return nil, fmt.Errorf("ZeroMQ handshake: %w", err)
	}
	return c, conn.SetDeadline(time.Time{})
}

const greetingBytes = 64

func (c *zmtpConn) handshake(own socketType) error {
	var greeting [greetingBytes]byte
	greeting[0], greeting[9] = 0xff, 0x7f // signature
	greeting[10] = 3                      // version 3.0
	copy(greeting[12:32], "NULL")         // no authentication
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
	ready := []byte("\x05READY")
	ready = appendProperty(ready, "Socket-Type", string(own))
	if own == typeDealer {
		ready = appendProperty(ready, "Identity", "")
	}
	if err := c.writeFrame(flagCommand, ready); err != nil {
		return err
	}
	return c.readReady(own)
}

// appendProperty appends a property of a READY command.
func appendProperty(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// readReady reads the peer's READY command.
func (c *zmtpConn) readReady(own socketType) error {
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
		reason := body
		if len(reason) > 0 {
			reason = reason[1:]
		}
		return fmt.Errorf("refused by the peer: %.100q", reason)
	default:
		return errors.New("the peer sends another command than READY")
	}
	peer := findProperty(body, "Socket-Type")
	if !slices.Contains(own.peers(), string(peer)) {
		return fmt.Errorf("the peer is a socket of type %.20q, want %s: is this the right port?", peer, strings.Join(own.peers(), " or "))
	}
	return nil
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

// subscribe asks for messages whose first frame begins with topic. It is sent as version 3.0
// does, as a message, which later versions accept as well.
func (c *zmtpConn) subscribe(topic string) error {
	return c.writeFrame(0, append([]byte{1}, topic...))
}

// writeMessage sends a message of one or more frames.
func (c *zmtpConn) writeMessage(frames ...[]byte) error {
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		if err := c.writeFrame(flags, frame); err != nil {
			return err
		}
	}
	return nil
}

func (c *zmtpConn) writeFrame(flags byte, body []byte) error {
	var b []byte
	if len(body) > 255 {
		b = binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body)))
	} else {
		b = []byte{flags, byte(len(body))}
	}
	if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := c.Write(append(b, body...))
	return err
}

// waitReadable blocks until there is something to read, and reports false if there is nothing
// until a time; the zero time means no limit.
func (c *zmtpConn) waitReadable(until time.Time) (readable bool, err error) {
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

// readMessage returns the frames of the next message, which are valid until the next call. It
// answers heartbeats meanwhile.
func (c *zmtpConn) readMessage() ([][]byte, error) {
	if c.message = c.message[:0]; cap(c.message) > maxKeptBytes {
		c.message = nil
	}
	var ends [maxFrames]int
	for n := 0; ; {
		flags, size, err := c.readFrameHeader()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.answerCommand(size); err != nil {
				return nil, err
			}
			continue
		}
		if n == maxFrames {
			return nil, fmt.Errorf("a message of more than %d frames", maxFrames)
		}
		if size > maxMessageBytes-len(c.message) {
			return nil, fmt.Errorf("a message of more than %d bytes", maxMessageBytes)
		}
		if c.message, err = appendBytes(c.message, c.reader, size); err != nil {
			return nil, err
		}
		ends[n] = len(c.message)
		if n++; flags&flagMore == 0 {
			start := 0
			for i, end := range ends[:n] {
				c.frames[i] = c.message[start:end:end]
				start = end
			}
			return c.frames[:n], nil
		}
	}
}

// readFrameHeader reads the flags and the size of a frame.
func (c *zmtpConn) readFrameHeader() (flags byte, size int, err error) {
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
	if declared > maxFrameBytes {
		return 0, 0, fmt.Errorf("a frame of %d bytes, the limit is %d", declared, maxFrameBytes)
	}
	return flags, int(declared), nil
}

// answerCommand reads a command of size bytes and answers PING. Others mean nothing to us.
func (c *zmtpConn) answerCommand(size int) error {
	if size > maxCommandBytes {
		_, err := c.reader.Discard(size)
		return noEOF(err)
	}
	name, body, err := c.readCommand(size)
	if err != nil || string(name) != "PING" {
		return err
	}
	if len(body) < 2 {
		return errors.New("a PING command without time to live")
	}
	return c.writeFrame(flagCommand, append([]byte("\x04PONG"), body[2:]...))
}

// readCommand reads a command of size bytes. name and body are valid until the next call.
func (c *zmtpConn) readCommand(size int) (name, body []byte, err error) {
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
