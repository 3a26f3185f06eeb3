package recorder

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestOpenOtherFile(t *testing.T) {
	dir := t.TempDir()
	f := func(name, content, want string) {
		t.Helper()
		file := filepath.Join(dir, name)
		if content != "" {
			if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		_, err := New(Options{Settings: Settings{File: file, MaxBytes: 1 << 20}, BlockBytes: 256})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
		if content == "" {
			return
		}
		if now := strings.Join(read(t, file), "\n") + "\n"; now != content {
			t.Errorf("%s is now %q", name, now)
		}
	}
	f("notes", "do not lose this\n", "not a recording")
	f("absent/traffic", "", "no such file")
	f(".", "", "directory")
}

// Two that write one file would cut off and overwrite each other's lines. (A
// lock is an opened file's, so that two in one process are as good as two processes.)
func TestOpenLockedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	r := newRecorder(t, file, 2000, 2)
	refused := func(when string) {
		t.Helper()
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, err = New(Options{Settings: Settings{File: file, MaxBytes: 1 << 20}, BlockBytes: 256})
		if err == nil || !strings.Contains(err.Error(), "another process records to "+file) ||
			!strings.Contains(err.Error(), "choose another file") {
			t.Errorf("%s: error %v", when, err)
		}
		if after, _ := os.ReadFile(file); !bytes.Equal(before, after) {
			t.Errorf("%s: the file changed", when)
		}
	}
	refused("at once")
	requests := many(60)
	for i := range requests {
		if err := r.out.addLine(r.encode.encode(&requests[i]).appendLine(nil), r.encode.headerLine); err != nil {
			t.Fatal(err)
		}
		if err := r.out.flush(); err != nil {
			t.Fatal(err)
		}
		refused(fmt.Sprintf("after %d requests", i+1))
	}
	if _, err := os.Stat(file + ".2"); err != nil {
		t.Errorf("it was not rotated: %v", err)
	}
	r.run() // ends
	newRecorder(t, file, 2000, 2).run(many(1)...)
}

func TestWaitForLock(t *testing.T) {
	first := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<30, 1)
	second := &recorder{file: first.file}
	var err error
	second.Recorder, err = New(Options{
		Settings: Settings{File: first.file, MaxBytes: 1 << 30}, BlockBytes: 256, Wait: true,
		Log: slog.New(slog.NewTextHandler(&second.log, nil)), Dropped: func() { second.dropped.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		second.Run(ctx)
	}()
	for range 100 {
		q := second.NewRequest()
		q.Bytes = 256
		second.Enqueue(q)
	}
	first.run(many(5)...)
	for len(second.queue) > 0 {
		time.Sleep(time.Millisecond)
	}
	end()
	<-done
	if lines := len(read(t, first.file)); lines != 107 || second.dropped.Load() != 0 || second.log.Len() != 0 {
		t.Errorf("%d lines, 2 of them headers, %d dropped: %s", lines, second.dropped.Load(), second.log.String())
	}
}
