// Package atomicfile replaces files as a whole: a reader, or a machine that crashes, finds the content of before or after.
//
// github.com/google/renameio (2.0) would make Write about 10 lines shorter. It does not sync the folder, so that a machine that
// crashes later may go back to the content of before; the temporary file of a process that is killed, which of an index
// may have hundreds of MiB, has a name that is not documented, so nothing could remove it; and it does not build on Windows.
package atomicfile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// tempSuffix ends the names of files that are being written. What is before it differs, so that two processes do not
	// collide on a disk that has no locks.
	tempSuffix = ".warmroute-tmp"
	// minStaleTempAge is the age at which a temporary file was left behind by a crash.
	minStaleTempAge = time.Hour
)

// Write replaces the file at path by what content writes. Only the owner can read it.
func Write(path string, content func(io.Writer) error) error {
	return writeTemp(path, content, os.Rename)
}

// Create creates the file at path with what content writes. Only the owner can read it. If the file exists, Create
// changes nothing and its error is fs.ErrExist.
func Create(path string, content func(io.Writer) error) error {
	return writeTemp(path, content, func(temp, path string) error {
		defer os.Remove(temp)
		return os.Link(temp, path)
	})
}

// writeTemp writes a temporary file beside path and passes both to place, which gives it its name.
func writeTemp(path string, content func(io.Writer) error, place func(temp, path string) error) error {
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*"+tempSuffix)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(file, 64<<10)
	err = content(out)
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		err = file.Sync() // or a crash of the machine could leave a name without content
	}
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = place(file.Name(), path)
	}
	if err != nil {
		os.Remove(file.Name())
		return err
	}
	syncFolder(filepath.Dir(path))
	return nil
}

// syncFolder has a crash of the machine keep what a folder lists. Not all file systems can do that.
func syncFolder(path string) {
	if folder, err := os.Open(path); err == nil {
		_ = folder.Sync()
		folder.Close()
	}
}

// RemoveStaleTemps removes the temporary files that earlier processes have left behind when they wrote path. isOurs
// reports whether a file may be removed; nil: all may.
func RemoveStaleTemps(path string, isOurs func(file string) bool) {
	entries, _ := os.ReadDir(filepath.Dir(path)) // who reads the file reports a folder that cannot be read
	for _, e := range entries {
		name := filepath.Join(filepath.Dir(path), e.Name())
		if !strings.HasPrefix(e.Name(), filepath.Base(path)+".") || !strings.HasSuffix(e.Name(), tempSuffix) || e.Type() != fs.FileMode(0) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > minStaleTempAge && (isOurs == nil || isOurs(name)) {
			os.Remove(name)
		}
	}
}

// CheckMark returns an error unless the file at path begins with mark, or is empty or absent. Of a file that is shorter
// than mark, all must be its beginning. kind names such a file in the error, with an article.
func CheckMark(path, mark, kind string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular(): // opening a pipe would block
		return fmt.Errorf("%s is not a regular file", path)
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	head := make([]byte, len(mark))
	n, err := io.ReadFull(file, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	if !strings.HasPrefix(mark, string(head[:n])) {
		return fmt.Errorf("%s is not %s; name another file", path, kind)
	}
	return nil
}
