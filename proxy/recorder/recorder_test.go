package recorder

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"warmroute/prompt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is one that runs, on a file of its own.
type recorder struct {
	*Recorder
	file    string
	log     bytes.Buffer
	dropped atomic.Int64
}

func newRecorder(t *testing.T, file string, most int64, keep int) *recorder {
	t.Helper()
	r := &recorder{file: file}
	var err error
	r.Recorder, err = New(Options{
		Settings: Settings{File: file, MaxBytes: most, Keep: keep}, BlockBytes: 256,
		Log: slog.New(slog.NewTextHandler(&r.log, nil)), Dropped: func() { r.dropped.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run records the requests and ends.
func (r *recorder) run(requests ...Request) {
	ctx, end := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	for _, given := range requests {
		q := r.NewRequest()
		blocks := append(q.Blocks, given.Blocks...)
		*q = given
		q.Blocks = blocks
		r.Enqueue(q)
	}
	end()
	<-done
}

func read(t *testing.T, file string) []string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}

// many makes requests whose lines are all alike in length.
func many(n int) []Request {
	out := make([]Request, n)
	for i := range out {
		out[i] = Request{Bytes: 1000 + i, Code: 200, Blocks: []prompt.Block{1, 2, 3}}
	}
	return out
}

// Requests that are cut off at the end of a shutdown end after the recorder.
func TestAddAfterRun(t *testing.T) {
	r := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<30, 1)
	const each = 500
	var late sync.WaitGroup
	ctx, end := context.WithCancel(context.Background())
	defer end()
	for range 4 {
		late.Go(func() {
			for i := range each {
				if i == each/2 {
					end()
				}
				q := r.NewRequest()
				q.Bytes, q.Blocks = 256, append(q.Blocks, 1)
				r.Enqueue(q)
			}
		})
	}
	r.Run(ctx)
	late.Wait()
	after := r.dropped.Load()
	r.Enqueue(r.NewRequest())
	if n := r.dropped.Load(); n != after+1 {
		t.Errorf("%d dropped after one more, want %d", n, after+1)
	}
	if kept := len(sizes(t, r.file)); kept+int(after) != 4*each {
		t.Errorf("%d recorded, %d dropped, want %d in all", kept, after, 4*each)
	}
	if n := r.blocks.Load(); n != 0 || len(r.queue) != 0 {
		t.Errorf("%d requests and %d blocks are still queued", len(r.queue), n)
	}
}

func TestFullQueue(t *testing.T) {
	f := func(name string, blocks, want int) {
		t.Helper()
		r := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<30, 1)
		for range want + 100 { // nobody writes
			q := r.NewRequest()
			q.Blocks, q.Bytes = make([]prompt.Block, blocks), maxInputBytes
			r.Enqueue(q)
		}
		if n := r.dropped.Load(); n != 100 {
			t.Errorf("%s: %d dropped, want 100", name, n)
		}
		r.run()
		if n := len(sizes(t, r.file)); n != want {
			t.Errorf("%s: %d recorded, want %d", name, n, want)
		}
		if n := r.blocks.Load(); n != 0 {
			t.Errorf("%s: %d blocks counted at the end", name, n)
		}
	}
	f("short prompts", 1, maxQueuedRequests)
	f("long prompts", maxRequestBlocks+5, maxQueuedBlocks/maxRequestBlocks)
}
