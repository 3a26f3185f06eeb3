//go:build !(linux && (amd64 || arm64)) || race

// Package netio is for Linux. Elsewhere it was not measured, and the race
// detector has to see what is read and written.
package netio

import "net"

// Reader is one that nobody has.
type Reader struct{ net.Conn }

// NewReader returns nil: c itself is to be read.
func NewReader(net.Conn) *Reader { return nil }

// Writer is one that nobody has.
type Writer struct{}

// NewWriter returns nil.
func NewWriter(net.Conn) *Writer { return nil }

// Begin leaves all of p to the connection's Write.
func (*Writer) Begin(p []byte) int { return 0 }
