package accesslog

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
)

// mostPiece is how much a pipe takes at once without mixing it with what others
// write to it.
const mostPiece = 4 << 10

// sink is an open file that lines go to. A nil one is none.
type sink struct {
	path    string // empty: stdout or stderr
	file    *os.File
	regular bool
	torn    bool // it ends in a part of a line
	failed  bool // the last write did not succeed
}

func open(name string) (*sink, error) {
	s := &sink{}
	var err error
	switch name {
	case "stdout":
		s.file, err = standard(os.Stdout)
	case "stderr":
		s.file, err = standard(os.Stderr)
	default:
		s.path = name
		// Nonblocking, or a pipe that nobody reads would hold up who opens it.
		s.file, err = os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NONBLOCK, 0o640)
	}
	if err != nil {
		return nil, err
	}
	info, err := s.file.Stat()
	if err != nil {
		s.file.Close()
		return nil, err
	}
	s.regular = info.Mode().IsRegular()
	return s, nil
}

// renew opens the file anew when another, or none, has its name now, as after a
// rotation of logs, and when nothing could be written to it. What happens to be
// truncated is gone on with: lines are appended to whatever is there.
func (s *sink) renew() error {
	if s == nil || s.path == "" || !s.failed && s.named() {
		return nil
	}
	fresh, err := open(s.path)
	if err != nil {
		return fmt.Errorf("%w; lines go on to the file that was open", err)
	}
	fresh.torn = s.torn && s.named()
	s.close()
	*s = *fresh
	return nil
}

func (s *sink) named() bool {
	named, err := os.Stat(s.path)
	if err != nil {
		return false
	}
	opened, err := s.file.Stat()
	return err == nil && os.SameFile(named, opened)
}

// write appends whole lines. It returns how many were lost, and why.
func (s *sink) write(lines []byte) (lost int, err error) {
	if s.torn { // what was left of that line is lost, those that follow are not
		if _, err = s.file.Write([]byte("\n")); err == nil {
			s.torn = false
		}
	}
	for len(lines) > 0 && err == nil {
		piece := lines
		if !s.regular && len(piece) > mostPiece {
			if end := bytes.LastIndexByte(piece[:mostPiece], '\n'); end >= 0 {
				piece = piece[:end+1]
			}
		}
		var n int
		n, err = s.file.Write(piece)
		lines = lines[n:]
		s.torn = n > 0 && piece[n-1] != '\n'
	}
	s.failed = err != nil
	return bytes.Count(lines, []byte("\n")), err
}

func (s *sink) target() *os.File {
	if s == nil {
		return nil
	}
	return s.file
}

func (s *sink) close() {
	if s != nil {
		s.file.Close()
	}
}
