package accesslog

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const failsafe = 20 * time.Second

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(failsafe); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// running is a Log that runs until end is called or the test ends.
type running struct {
	*Log
	own *lockedBuffer // its warnings
	end func()
}

func start(t *testing.T, s Settings) *running {
	t.Helper()
	r := &running{own: &lockedBuffer{}}
	var err error
	if r.Log, err = New(s, slog.New(slog.NewTextHandler(r.own, nil))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	writing.Go(func() { r.Run(ctx, nil) })
	r.end = func() { cancel(); writing.Wait() }
	t.Cleanup(r.end)
	return r
}

// configure changes the settings of a Log.
func configure(t *testing.T, l *Log, s Settings) error {
	t.Helper()
	apply, err := l.PrepareSettings(s)
	if err == nil {
		apply()
	}
	return err
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// lines returns the request IDs in a file, all of whose lines must be complete.
func lines(t *testing.T, path string) (ids []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var e struct {
			ID string `json:"request_id"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		ids = append(ids, e.ID)
	}
	return ids
}

func ok(id string) *Entry {
	return &Entry{At: time.Now(), ID: id, Code: 200, Tokens: Tokens{Cached: -1}}
}

func TestLines(t *testing.T) {
	full := &Entry{
		At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), ID: "r-1", Client: "10.0.0.1:5", Key: "team", Endpoint: "/v1/chat/completions",
		Model: "m", Backend: "b", PrefillBackend: "p", Reason: "prefix", Disconnected: "in_stream", TraceID: "0af7651916cd43dd8448eb211c80319c",
		Failures: []Failure{{"a", "connect"}, {"b", "status_503"}},
		Code:     499, Attempts: 3, BytesIn: 10, BytesOut: 20, Tokens: Tokens{Prompt: 100, Predicted: 64, Cached: 0, Output: 7},
		Times: Times{Total: 2 * time.Second, TTFT: 1500 * time.Microsecond, Queued: 30 * time.Millisecond, Overhead: 42 * time.Microsecond,
			Prefill: 70 * time.Millisecond},
	}
	refused := &Entry{At: full.At, ID: "r-2", Endpoint: "/v1/chat/completions", Code: 503, Tokens: Tokens{Cached: -1}}
	for format, want := range map[string]string{
		"json": `{"time":"2026-01-02T03:04:05Z","level":"INFO","msg":"request","request_id":"r-1","client":"10.0.0.1:5","key":"team",` +
			`"endpoint":"/v1/chat/completions","model":"m","code":499,` +
			`"duration_ms":2000,"bytes_in":10,"bytes_out":20,"backend":"b","reason":"prefix","attempts":3,"prompt_tokens":100,` +
			`"predicted_tokens":64,"cached_tokens":0,"output_tokens":7,"overhead_us":42,` +
			`"prefill_backend":"p","prefill_ms":70,"ttft_ms":1.5,"queue_ms":30,"failures":"connect,status_503","disconnected":"in_stream",` +
			`"trace_id":"0af7651916cd43dd8448eb211c80319c"}` + "\n" +
			`{"time":"2026-01-02T03:04:05Z","level":"WARN","msg":"request","request_id":"r-2","endpoint":"/v1/chat/completions","code":503,` +
			`"duration_ms":0,"bytes_in":0,"bytes_out":0}` + "\n",
		"text": `time=2026-01-02T03:04:05.000Z level=INFO msg=request request_id=r-1 client=10.0.0.1:5 key=team endpoint=/v1/chat/completions ` +
			`model=m code=499 ` +
			`duration_ms=2000 bytes_in=10 bytes_out=20 backend=b reason=prefix attempts=3 prompt_tokens=100 predicted_tokens=64 cached_tokens=0 ` +
			`output_tokens=7 overhead_us=42 ` +
			`prefill_backend=p prefill_ms=70 ttft_ms=1.5 queue_ms=30 failures=connect,status_503 disconnected=in_stream ` +
			`trace_id=0af7651916cd43dd8448eb211c80319c` + "\n" +
			`time=2026-01-02T03:04:05.000Z level=WARN msg=request request_id=r-2 endpoint=/v1/chat/completions code=503 duration_ms=0 bytes_in=0 ` +
			`bytes_out=0` + "\n",
	} {
		path := filepath.Join(t.TempDir(), "log")
		l := start(t, Settings{File: path, Format: format, Sample: 1})
		l.EnqueueSampled(full)
		l.EnqueueSampled(refused)
		l.end()
		if got, _ := os.ReadFile(path); string(got) != want {
			t.Errorf("%s: got\n%s\nwant\n%s", format, got, want)
		}
		if l.DroppedLines() != 0 {
			t.Errorf("%d lost", l.DroppedLines())
		}
	}
}

func TestSample(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l := start(t, Settings{File: path, Format: "json", Sample: 0})
	for code, id := range map[int]string{200: "fine", 404: "theirs", 499: "left", 502: "ours"} {
		e := ok(id)
		e.Code = code
		l.EnqueueSampled(e)
	}
	late := ok("late") // left with the status already sent
	late.Disconnected = "in_body"
	l.EnqueueSampled(late)
	if err := configure(t, l.Log, Settings{File: path, Format: "json", Sample: 0.5}); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		l.EnqueueSampled(ok("sampled"))
	}
	l.end()
	got := lines(t, path)
	n := 0
	for _, id := range got {
		if id == "fine" {
			t.Error("a request without an error was logged")
		}
		if id == "sampled" {
			n++
		}
	}
	if len(got)-n != 4 || n < 300 || n > 700 {
		t.Errorf("%d errors and %d of 1000", len(got)-n, n)
	}
}

func TestRenamedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	l := start(t, Settings{File: path, Format: "json", Sample: 1})
	l.EnqueueSampled(ok("before"))
	eventually(t, "it is written", func() bool { return len(lines(t, path)) == 1 })
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is a new file", func() bool { _, err := os.Stat(path); return err == nil })
	l.EnqueueSampled(ok("after"))
	l.end()
	if old, fresh := lines(t, path+".1"), lines(t, path); strings.Join(old, " ") != "before" || strings.Join(fresh, " ") != "after" {
		t.Errorf("old %v, new %v", old, fresh)
	}
}

func TestTruncatedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l := start(t, Settings{File: path, Format: "json", Sample: 1})
	l.EnqueueSampled(ok("before"))
	eventually(t, "it is written", func() bool { return len(lines(t, path)) == 1 })
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	l.EnqueueSampled(ok("after"))
	l.end()
	if got := lines(t, path); strings.Join(got, " ") != "after" { // without zeros in front
		t.Errorf("got %v", got)
	}
}

func TestConfigure(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	l := start(t, Settings{File: one, Format: "json", Sample: 1})
	l.EnqueueSampled(ok("1"))
	eventually(t, "it is written", func() bool { return len(lines(t, one)) == 1 })
	if err := configure(t, l.Log, Settings{File: filepath.Join(dir, "no", "such"), Format: "json", Sample: 1}); err == nil {
		t.Error("a file that cannot be opened is no error")
	}
	if err := configure(t, l.Log, Settings{File: two, Format: "json", Sample: 1}); err != nil {
		t.Fatal(err)
	}
	l.EnqueueSampled(ok("2"))
	eventually(t, "it is written", func() bool { return len(lines(t, two)) == 1 })
	if err := configure(t, l.Log, Settings{}); err != nil || l.Enabled() {
		t.Errorf("%v, on %v", err, l.Enabled())
	}
	l.EnqueueSampled(ok("3"))
	l.end()
	if a, b := lines(t, one), lines(t, two); strings.Join(a, " ") != "1" || strings.Join(b, " ") != "2" || l.DroppedLines() != 0 {
		t.Errorf("%v %v, %d lost", a, b, l.DroppedLines())
	}
}

func TestLogRequestAfterRun(t *testing.T) {
	l := start(t, Settings{File: filepath.Join(t.TempDir(), "log"), Format: "json", Sample: 1})
	l.end()
	l.EnqueueSampled(ok("late"))
	if l.DroppedLines() != 1 {
		t.Errorf("%d lost", l.DroppedLines())
	}
}

func TestTornLine(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	f := &file{File: w}
	w.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	long := strings.Repeat("x", 1<<20) // does not fit into the pipe
	unwritten, err := f.write([]byte("first\n" + long + "\nsecond\n"))
	if err == nil || !f.torn || bytes.Count(unwritten, []byte("\n")) != 2 {
		t.Fatalf("%d bytes not written, %v, torn %v", len(unwritten), err, f.torn)
	}
	w.SetWriteDeadline(time.Time{})
	read := make(chan string)
	go func() {
		text, _ := io.ReadAll(r)
		read <- string(text)
	}()
	if unwritten, err := f.write([]byte("whole\n")); len(unwritten) != 0 || err != nil {
		t.Errorf("%q not written, %v", unwritten, err)
	}
	w.Close()
	got := strings.Split(strings.TrimSuffix(<-read, "\n"), "\n")
	if len(got) != 3 || got[0] != "first" || got[2] != "whole" || !strings.HasPrefix(long, got[1]) {
		t.Errorf("%d lines, the last is %q", len(got), got[len(got)-1])
	}
}

func BenchmarkLogRequest(b *testing.B) {
	for _, format := range []string{"json", "text", "off"} {
		b.Run(format, func(b *testing.B) {
			s := Settings{File: os.DevNull, Format: format, Sample: 1}
			if format == "off" {
				s.File = ""
			}
			l, err := New(s, slog.New(slog.DiscardHandler))
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			var writing sync.WaitGroup
			writing.Go(func() { l.Run(ctx, nil) })
			e := ok("wr-0123456789abcdef0123456789abcdef")
			e.Endpoint, e.Model, e.Backend, e.Reason, e.Attempts, e.Client = "/v1/chat/completions", "m", "b:8000", "prefix", 1,
				"127.0.0.1:"+strconv.Itoa(40000)
			b.ReportAllocs()
			for b.Loop() {
				l.EnqueueSampled(e)
			}
			cancel()
			writing.Wait()
		})
	}
}
