package accesslog

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// stuckPipe returns a pipe whose reader does not read.
func stuckPipe(t *testing.T) (path string, reader *os.File) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	return path, reader
}

func TestUnreadPipe(t *testing.T) {
	t.Parallel()
	path, reader := stuckPipe(t)
	l := start(t, Settings{File: path, Format: "json", Sample: 1})
	const sent = 100_000 // about 12 MB, more than waits, is being written, and the pipe takes together
	for i := range sent {
		l.EnqueueSampled(ok(strconv.Itoa(i)))
	}
	if l.DroppedLines() == 0 {
		t.Fatal("nothing is lost: the bound is not there, or the test is too small")
	}
	l.end()
	if !strings.Contains(l.own.String(), "writing the access log failed") {
		t.Errorf("nothing is said: %s", l.own.String())
	}
	got := 0
	for in := bufio.NewScanner(reader); in.Scan(); got++ {
		if line := in.Text(); !strings.HasPrefix(line, "{") || !strings.HasSuffix(line, "}") {
			t.Fatalf("half a line: %s", line)
		}
	}
	if int64(got)+l.DroppedLines() != sent {
		t.Errorf("%d read and %d lost, of %d", got, l.DroppedLines(), sent)
	}
}

func TestConfigureDuringStuckWrite(t *testing.T) {
	t.Parallel()
	pipe, reader := stuckPipe(t)
	l := start(t, Settings{File: pipe, Format: "json", Sample: 1})
	for i := range 2000 { // more than the pipe takes
		l.EnqueueSampled(ok(strconv.Itoa(i)))
	}
	eventually(t, "the pipe is full", func() bool {
		buffered, err := unix.IoctlGetInt(int(reader.Fd()), unix.TIOCINQ)
		return err == nil && buffered > 60<<10
	})
	path := filepath.Join(t.TempDir(), "log")
	if err := configure(t, l.Log, Settings{File: path, Format: "json", Sample: 1}); err != nil {
		t.Fatal(err)
	}
	l.EnqueueSampled(ok("next"))
	eventually(t, "the other file has the line", func() bool { return slices.Contains(lines(t, path), "next") })
}

func TestFullDisk(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Fatal("this system has no /dev/full: ", err)
	}
	l := start(t, Settings{File: "/dev/full", Format: "json", Sample: 1})
	for i := range 3 {
		l.EnqueueSampled(ok(strconv.Itoa(i)))
		eventually(t, "it is counted", func() bool { return l.DroppedLines() == int64(i)+1 })
	}
	l.end()
	if n := strings.Count(l.own.String(), "no space left on device"); n != 1 {
		t.Errorf("it is said %d times: %s", n, l.own.String())
	}
}

func TestPipeWithoutReader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openFile(path); err == nil {
		t.Error("it was opened")
	}
}
