package redis

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"syscall"
)

// Bounds of one reply. The library allocates what a reply announces before that has arrived, and calls itself for each level of
// nesting: without bounds a few bytes of a server, or an entry that another client has stored, would end this process.
const (
	// maxReplyBytes is more than honest proxies write: the messages that are read at once, the records of a fleet.
	maxReplyBytes = 32 << 20
	// maxStringBytes is more than a message has, or a piece of a snapshot.
	maxStringBytes = 4 << 20
	// maxReplyElements is more than the records of a fleet have, or the slots of a Redis Cluster.
	maxReplyElements = 1 << 17
	maxReplyDepth    = 16
	// maxLineBytes bounds a status, an error or a number.
	maxLineBytes = 64 << 10
	// maxLengthBytes bounds the digits of a length, with their CRLF.
	maxLengthBytes = 16
	// maxFirstStringBytes bounds what is kept of a reply's first strings.
	maxFirstStringBytes = 512
)

// ReplyError says why a reply was refused. Its connection is closed.
type ReplyError struct {
	problem string
	// firstStrings are the first two strings of the reply; fewer if they had not arrived, or are long.
	firstStrings []string
}

func (e *ReplyError) Error() string {
	return "reply refused: " + e.problem + "; warmroute did not write this value, or the server is not Redis"
}

// replyChecker follows what a server sends, in RESP2 or RESP3, in parts of any size, and fails at what is beyond the bounds
// before the library sees it. It keeps no values. The zero value is at the start of a reply.
type replyChecker struct {
	state  checkerState
	kind   byte   // of the value that is read
	length []byte // the line with its length, so far
	left   int    // bytes of the line that may still come, or of the string that will
	open   []int  // of each aggregate that has begun, how many values are still to come

	bytes, elements int // of the reply, so far
	firstStrings    []string
	text            []byte // the string that is read, if it is one of the first
	err             *ReplyError
}

type checkerState byte

const (
	atValue  checkerState = iota // the first byte of a value comes next
	inLine                       // of a value that is a line
	inLength                     // of a string or an aggregate
	inString
)

// check reads the next bytes. Once it has failed, it returns that error again.
func (c *replyChecker) check(b []byte) error {
	for len(b) > 0 && c.err == nil {
		b = b[c.readSome(b):]
	}
	if c.err != nil {
		return c.err
	}
	return nil
}

// readSome reads the first bytes of b, and returns how many.
func (c *replyChecker) readSome(b []byte) (n int) {
	switch c.state {
	case atValue:
		c.countBytes(1)
		c.beginValue(b[0])
		return 1
	case inString:
		n = min(c.left, len(b))
		c.countBytes(n)
		c.left -= n
		if c.text != nil {
			c.text = append(c.text, b[:n]...)
		}
		if c.left == 0 {
			c.endString()
		}
		return n
	}
	n = bytes.IndexByte(b, '\n') + 1
	isEnd := n > 0
	if !isEnd {
		n = len(b)
	}
	c.countBytes(n)
	if c.left -= n; c.left < 0 {
		c.refuse("a line of it is too long")
		return n
	}
	if c.state == inLength {
		c.length = append(c.length, b[:n]...)
	}
	switch {
	case isEnd && c.state == inLength:
		c.endLength()
	case isEnd:
		c.endValue()
	}
	return n
}

func (c *replyChecker) countBytes(n int) {
	if c.bytes += n; c.bytes > maxReplyBytes {
		c.refuse("it has more than %d bytes", maxReplyBytes)
	}
}

func (c *replyChecker) beginValue(kind byte) {
	c.kind = kind
	switch kind {
	case '+', '-', ':', '_', ',', '#', '(':
		c.state, c.left = inLine, maxLineBytes
	case '$', '=', '!', '*', '~', '>', '%':
		c.state, c.left, c.length = inLength, maxLengthBytes, c.length[:0]
	default: // attributes are not sent to clients that do not ask for them
		c.refuse("%q begins no value", kind)
	}
}

func (c *replyChecker) endLength() {
	digits, isLine := bytes.CutSuffix(c.length, []byte("\r\n"))
	n, err := strconv.Atoi(string(digits))
	switch {
	case !isLine || err != nil || n < -1 || digits[0] == '+':
		c.refuse("%q is not a length", c.length)
	case n == -1: // null
		c.endValue()
	case c.kind == '$' || c.kind == '=' || c.kind == '!':
		if n > maxStringBytes {
			c.refuse("it announces a string of %d bytes, more than %d", n, maxStringBytes)
			return
		}
		c.state, c.left = inString, n+len("\r\n")
		if c.kind == '$' && n <= maxFirstStringBytes && len(c.firstStrings) < 2 {
			c.text = make([]byte, 0, c.left)
		}
	default:
		c.beginAggregate(n)
	}
}

func (c *replyChecker) beginAggregate(n int) {
	if n > maxReplyElements-c.elements || c.kind == '%' && n > (maxReplyElements-c.elements)/2 {
		c.refuse("it announces %d elements, more than %d in all", n, maxReplyElements)
		return
	}
	if c.kind == '%' {
		n *= 2
	}
	c.elements += n
	switch {
	case n == 0:
		c.endValue()
	case len(c.open) == maxReplyDepth:
		c.refuse("it is nested more than %d deep", maxReplyDepth)
	default:
		c.open = append(c.open, n)
		c.state = atValue
	}
}

func (c *replyChecker) endString() {
	if c.text != nil {
		c.firstStrings, c.text = append(c.firstStrings, string(c.text[:len(c.text)-len("\r\n")])), nil
	}
	c.endValue()
}

// endValue ends a value and the aggregates of which it is the last one, or the reply.
func (c *replyChecker) endValue() {
	c.state = atValue
	for i := len(c.open) - 1; i >= 0; i-- {
		if c.open[i]--; c.open[i] > 0 {
			return
		}
		c.open = c.open[:i]
	}
	c.bytes, c.elements, c.firstStrings = 0, 0, c.firstStrings[:0]
}

func (c *replyChecker) refuse(problem string, args ...any) {
	if c.err == nil {
		c.err = &ReplyError{problem: fmt.Sprintf(problem, args...), firstStrings: c.firstStrings}
	}
}

// checkedConn fails to read what a replyChecker refuses. One goroutine at a time may read.
type checkedConn struct {
	net.Conn
	checker replyChecker
	onClose func()
}

func (c *checkedConn) Read(b []byte) (int, error) {
	if c.checker.err != nil { // the library reads on after some errors
		return 0, c.checker.err
	}
	n, err := c.Conn.Read(b)
	if refused := c.checker.check(b[:n]); refused != nil {
		return 0, refused // not even what is within the bounds: it may be the start of a length
	}
	return n, err
}

func (c *checkedConn) Close() error {
	c.onClose()
	return c.Conn.Close()
}

// checkedSocket is a checkedConn without TLS. The library looks at its socket to find that an idle connection was closed.
type checkedSocket struct {
	checkedConn
	socket syscall.Conn
}

func (c *checkedSocket) SyscallConn() (syscall.RawConn, error) { return c.socket.SyscallConn() }
