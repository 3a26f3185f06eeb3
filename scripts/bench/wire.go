package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// head is what matters of the head of an HTTP/1.1 message: its first line, and
// where its body ends.
type head struct {
	first   []byte // valid until the next one is read into the same head
	length  int    // of the body; -1: not said
	chunked bool
}

// read takes a message's head from br. The ends of a benchmark are to be cheaper
// than what is between them, so it looks at two fields and allocates nothing.
func (h *head) read(br *bufio.Reader) error {
	h.first, h.length, h.chunked = h.first[:0], -1, false
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return nil
		}
		if len(h.first) == 0 {
			h.first = append(h.first, line...)
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

// body reads the message's body into buf, which grows as needed. What says
// nothing of its length has none.
func (h *head) body(br *bufio.Reader, buf []byte) ([]byte, error) {
	buf = buf[:0]
	if !h.chunked {
		return readInto(br, buf, max(h.length, 0))
	}
	for {
		size, err := chunkSize(br)
		if err != nil {
			return buf, err
		}
		if buf, err = readInto(br, buf, size); err != nil {
			return buf, err
		}
		if err = lineEnd(br); err != nil || size == 0 {
			return buf, err
		}
	}
}

func readInto(br *bufio.Reader, buf []byte, n int) ([]byte, error) {
	have := len(buf)
	for cap(buf) < have+n {
		buf = append(buf[:cap(buf)], 0)
	}
	buf = buf[:have+n]
	_, err := io.ReadFull(br, buf[have:])
	return buf, err
}

var errFraming = errors.New("malformed chunk")

func chunkSize(br *bufio.Reader) (int, error) {
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

func lineEnd(br *bufio.Reader) error {
	line, err := br.ReadSlice('\n')
	if err == nil && len(bytes.TrimRight(line, "\r\n")) > 0 {
		err = errFraming
	}
	return err
}

// chunks reads a chunked body as the bytes it carries.
type chunks struct {
	br   *bufio.Reader
	left int // bytes to come of this chunk
	open bool
}

func (c *chunks) Read(p []byte) (int, error) {
	for c.left == 0 {
		if c.open {
			if err := lineEnd(c.br); err != nil {
				return 0, err
			}
		}
		size, err := chunkSize(c.br)
		if err != nil {
			return 0, err
		}
		if size == 0 {
			if err := lineEnd(c.br); err != nil {
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
