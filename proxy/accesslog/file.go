package accesslog

import (
	"bytes"
	"os"
	"syscall"
)

// maxWrite is how much a pipe accepts without mixing it with what other processes write to it.
const maxWrite = 4 << 10

// file is what lines are written to. Only Close may be called concurrently.
type file struct {
	*os.File
	path string // empty: stdout or stderr
	torn bool   // the last line is incomplete
}

// openFile opens a file for appending. It returns an error if it is a pipe without a reader.
func openFile(name string) (f *file, err error) {
	f = &file{}
	switch name {
	case "stdout":
		f.File, err = duplicate(os.Stdout)
	case "stderr":
		f.File, err = duplicate(os.Stderr)
	default:
		f.path = name
		// Opening a pipe without a reader would block if it were not nonblocking.
		f.File, err = os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NONBLOCK, 0o640)
	}
	return f, err
}

// wasRenamed reports whether another file, or none, has the file's name now.
func (f *file) wasRenamed() bool {
	if f.path == "" {
		return false
	}
	named, err := os.Stat(f.path)
	if err != nil {
		return true
	}
	opened, err := f.Stat()
	return err != nil || !os.SameFile(named, opened)
}

// write appends whole lines and returns those that were not written.
func (f *file) write(lines []byte) (unwritten []byte, err error) {
	if f.torn { // the next line must not continue it
		if _, err = f.Write([]byte("\n")); err == nil {
			f.torn = false
		}
	}
	for len(lines) > 0 && err == nil {
		n := 1 + bytes.LastIndexByte(lines[:min(len(lines), maxWrite)], '\n')
		if n == 0 { // a long line
			n = 1 + bytes.IndexByte(lines, '\n')
		}
		part := lines[:n]
		n, err = f.Write(part)
		lines = lines[n:]
		f.torn = n > 0 && part[n-1] != '\n'
	}
	return lines, err
}
