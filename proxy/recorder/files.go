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
	// mark begins every recording.
	mark = `{"warmroute_record":`
	// bufferBytes is how much is gathered before it is written.
	bufferBytes = 64 << 10
	// longestLine is above any line's length.
	longestLine = 1 << 20
)

// files is a file that grows, and those before it: path.1 is the latest. Lines
// reach the disk whole or not at all, many at a time.
type files struct {
	path string
	max  int64 // bytes of one
	keep int

	file   *os.File // nil after a failure, until it can be opened again
	size   int64    // of what is whole in it
	headed bool     // the header of this run stands in it, or in buf
	buf    []byte
	lines  int // in buf
}

// open goes on with a file that is there. A line that an earlier run did not
// finish is cut off; a file that is no recording, or another process's, is left
// alone.
func (f *files) open() error {
	file, err := os.OpenFile(f.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	var size int64
	if err = f.own(file); err == nil {
		size, err = completeLinesLength(file)
	}
	if err == nil {
		err = file.Truncate(size)
	}
	if err == nil {
		err = file.Chmod(0o600) // when and how much somebody asks is nobody's business
	}
	if err == nil {
		_, err = file.Seek(size, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return err
	}
	f.file, f.size, f.headed = file, size, false
	return nil
}

// own locks a file that was opened. Another process may have renamed it before
// the lock was had.
func (f *files) own(file *os.File) error {
	if err := filelock.TryLock(file); errors.Is(err, filelock.ErrLocked) {
		return fmt.Errorf("another process records to %s; stop it, or choose another file for one of the two", f.path)
	} else if err != nil {
		return err
	}
	opened, err := file.Stat()
	if err != nil {
		return err
	}
	if named, err := os.Stat(f.path); err != nil || !os.SameFile(opened, named) {
		return fmt.Errorf("%s was renamed while it was opened; does another process record to it?", f.path)
	}
	return nil
}

// completeLinesLength returns the length of a recording up to its last line's end.
func completeLinesLength(file *os.File) (int64, error) {
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%s is no plain file", file.Name())
	}
	size := info.Size()
	head := make([]byte, min(size, int64(len(mark))))
	if _, err := file.ReadAt(head, 0); err != nil && size > 0 {
		return 0, err
	}
	if !bytes.HasPrefix([]byte(mark), head) {
		return 0, fmt.Errorf("%s is no recording of warmroute's; choose another file", file.Name())
	}
	tail := make([]byte, min(size, longestLine))
	if _, err := file.ReadAt(tail, size-int64(len(tail))); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	return size - int64(len(tail)-(bytes.LastIndexByte(tail, '\n')+1)), nil
}

// add takes a line, and header to stand before the first of this run in each
// file. It returns how many lines were lost, and why.
func (f *files) add(line, header []byte) (lost int, err error) {
	if f.file == nil {
		if err := f.open(); err != nil {
			return 1, err
		}
	}
	if f.size+int64(len(f.buf)+len(header)+len(line)) > f.max && f.size+int64(len(f.buf)) > 0 {
		if lost, err = f.rotate(); err != nil {
			return lost + 1, err
		}
	}
	if !f.headed {
		f.buf = append(f.buf, header...)
		f.headed = true
	}
	f.buf = append(f.buf, line...)
	f.lines++
	if len(f.buf) < bufferBytes {
		return lost, nil
	}
	more, err := f.flush()
	return lost + more, err
}

// flush writes what was gathered.
func (f *files) flush() (lost int, err error) {
	if len(f.buf) == 0 {
		return 0, nil
	}
	n, lines := len(f.buf), f.lines
	_, err = f.file.Write(f.buf)
	f.buf, f.lines = f.buf[:0], 0
	if err != nil {
		f.close() // what was half written is cut off when it is opened again
		return lines, err
	}
	f.size += int64(n)
	return 0, nil
}

// rotate renames path.1 to path.2 and so on, then path to path.1, and opens a
// new one.
func (f *files) rotate() (lost int, err error) {
	if lost, err = f.flush(); err != nil {
		return lost, err
	}
	// Closed, and so unlocked, only when another file has the name and the lock:
	// else who waits for either would go on with this one.
	defer f.file.Close()
	f.file = nil
	if f.keep == 0 {
		err = os.Remove(f.path)
	}
	for i := f.keep - 1; i >= 0 && err == nil; i-- {
		err = os.Rename(f.name(i), f.name(i+1))
		if i > 0 && errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return lost, err
	}
	return lost, f.open()
}

// name is that of the i-th file before the one that grows.
func (f *files) name(i int) string {
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
