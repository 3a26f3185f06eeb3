package recorder

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"warmroute/filelock"
)

const (
	// fileMark begins every recording.
	fileMark = `{"warmroute_record":`
	// minWriteBytes is how much is buffered before it is written.
	minWriteBytes = 64 << 10
	maxLineBytes  = 2 << 20
)

// files is the current file of a recording and its predecessors; path.1 is the latest.
// Lines are written whole or not at all, many at a time.
type files struct {
	path string
	max  int64 // bytes of one file
	keep int   // predecessors

	file      *os.File // nil after an error, until it is opened again
	size      int64    // of its complete lines
	headed    bool     // the header of this run is in the file or in buf
	buf       []byte
	lines     int // in buf
	unwritten int // lines that could not be written
}

// open opens the file and continues it if it exists. It removes an incomplete last line.
// It fails if the file is not a recording or is locked by another process.
func (f *files) open() (err error) {
	file, err := filelock.TryOpen(f.path)
	if errors.Is(err, filelock.ErrLocked) {
		return fmt.Errorf("another process records to %s: stop it, or choose another file for one of the two", f.path)
	} else if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	size, err := completeLinesLength(file)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Truncate(size), file.Chmod(0o600)); err != nil { // the traffic is confidential
		return err
	}
	if _, err := file.Seek(size, io.SeekStart); err != nil {
		return err
	}
	f.file, f.size, f.headed = file, size, false
	return nil
}

// completeLinesLength returns the length of a recording up to the end of its last complete line.
func completeLinesLength(file *os.File) (int64, error) {
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%s is not a regular file", file.Name())
	}
	size := info.Size()
	head := make([]byte, min(size, int64(len(fileMark))))
	if _, err := file.ReadAt(head, 0); err != nil && size > 0 {
		return 0, err
	}
	if !bytes.HasPrefix([]byte(fileMark), head) {
		return 0, fmt.Errorf("%s is not a recording of warmroute: choose another file", file.Name())
	}
	tail := make([]byte, min(size, maxLineBytes))
	if _, err := file.ReadAt(tail, size-int64(len(tail))); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	return size - int64(len(tail)-(bytes.LastIndexByte(tail, '\n')+1)), nil
}

// addLine buffers a line, after header if it is the first one of this run in the file, and
// writes the buffer when it is large. If it fails, those that were not written count in f.unwritten.
func (f *files) addLine(line, header []byte) (err error) {
	if f.file == nil {
		err = f.open()
	}
	if written := f.size + int64(len(f.buf)); err == nil && written > 0 && written+int64(len(header)+len(line)) > f.max {
		err = f.rotate()
	}
	if err != nil {
		f.unwritten++
		return err
	}
	if !f.headed {
		f.buf = append(f.buf, header...)
		f.headed = true
	}
	f.buf = append(f.buf, line...)
	f.lines++
	if len(f.buf) < minWriteBytes {
		return nil
	}
	return f.flush()
}

// flush writes the buffered lines. If it fails, they are not written.
func (f *files) flush() error {
	if len(f.buf) == 0 {
		return nil
	}
	n, err := f.file.Write(f.buf)
	if err != nil {
		f.unwritten += f.lines
		f.close() // open removes an incomplete line
	}
	f.size += int64(n)
	f.buf, f.lines = f.buf[:0], 0
	return err
}

// rotate renames path.1 to path.2 and so on, then path to path.1, and opens a new file.
func (f *files) rotate() (err error) {
	if err = f.flush(); err != nil {
		return err
	}
	// It must stay locked until the new file is: otherwise a waiting process would
	// continue this one.
	defer f.file.Close()
	f.file = nil
	if f.keep == 0 {
		err = os.Remove(f.path)
	}
	for i := f.keep - 1; i >= 0 && err == nil; i-- {
		err = os.Rename(f.nthName(i), f.nthName(i+1))
		if i > 0 && errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	return f.open()
}

// nthName returns the name of the i-th predecessor, or of the current file.
func (f *files) nthName(i int) string {
	if i == 0 {
		return f.path
	}
	return fmt.Sprintf("%s.%d", f.path, i)
}

func (f *files) close() {
	if f.file != nil {
		f.file.Close()
		f.file = nil
	}
}
