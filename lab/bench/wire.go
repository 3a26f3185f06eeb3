package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// messageHead is the part of an HTTP/1.1 message's head that is needed: the first line and
// the length of the body.
type messageHead struct {
	firstLine []byte // valid until the next read
	length    int    // of the body; -1: unknown
	chunked   bool
}

// read reads a message's head from br. It parses two fields and allocates nothing: clients
// and mock replicas must be cheaper than the measured proxy.
func (h *messageHead) read(br *bufio.Reader) error {
	h.firstLine, h.length, h.chunked = h.firstLine[:0], -1, false
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return nil
		}
		if len(h.firstLine) == 0 {
			h.firstLine = append(h.firstLine, line...)
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if h.length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return fmt.Errorf("content length: %w", err)
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			h.chunked = true
		}
	}
}

// readBody reads the message's body into buf, which it grows as needed, and returns it. A
// message without a length has no body.
func (h *messageHead) readBody(br *bufio.Reader, buf []byte) ([]byte, error) {
	buf = buf[:0]
	if !h.chunked {
		return readAndAppend(br, buf, max(h.length, 0))
	}
	for {
		size, err := readChunkSize(br)
		if err != nil {
			return buf, err
		}
		if buf, err = readAndAppend(br, buf, size); err != nil {
			return buf, err
		}
		if err = readLineEnd(br); err != nil || size == 0 {
			return buf, err
		}
	}
}

// readAndAppend appends n bytes from br to buf.
func readAndAppend(br *bufio.Reader, buf []byte, n int) ([]byte, error) {
	have := len(buf)
	for cap(buf) < have+n {
		buf = append(buf[:cap(buf)], 0)
	}
	buf = buf[:have+n]
	_, err := io.ReadFull(br, buf[have:])
	return buf, err
}

var errFraming = errors.New("malformed chunk")

func readChunkSize(br *bufio.Reader) (int, error) {
	line, err := br.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	size, err := strconv.ParseUint(string(bytes.TrimRight(line, "\r\n")), 16, 31)
	if err != nil {
		return 0, errFraming
	}
	return int(size), nil
}

func readLineEnd(br *bufio.Reader) error {
	line, err := br.ReadSlice('\n')
	if err == nil && len(bytes.TrimRight(line, "\r\n")) > 0 {
		err = errFraming
	}
	return err
}

// chunkedReader decodes a chunked body.
type chunkedReader struct {
	br   *bufio.Reader
	left int // bytes left in this chunk
	open bool
}

func (c *chunkedReader) Read(p []byte) (int, error) {
	for c.left == 0 {
		if c.open {
			if err := readLineEnd(c.br); err != nil {
				return 0, err
			}
		}
		size, err := readChunkSize(c.br)
		if err != nil {
			return 0, err
		}
		if size == 0 {
			if err := readLineEnd(c.br); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		c.left, c.open = size, true
	}
	n, err := c.br.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}
