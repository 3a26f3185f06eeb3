package record

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/router/prompt"
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
		File: file, MaxBytes: most, Keep: keep, BlockBytes: 256,
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
		q := r.Begin()
		blocks := append(q.Blocks, given.Blocks...)
		*q = given
		q.Blocks = blocks
		r.Add(q)
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

func TestALineSaysWhatARequestWasAndNothingThatWasSaid(t *testing.T) {
	r := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<20, 1)
	at := func(ms float64) time.Time { return r.encode.start.Add(time.Duration(ms * float64(time.Millisecond))) }
	r.run(
		Request{Arrived: at(1.5), Model: "secret-model", Session: 0xfeedfacefeedface, Streams: true, Bytes: 700, Plain: true,
			Blocks: []prompt.Block{0xdeadbeefdeadbeef, 0xabad1deaabad1dea}, PromptTokens: 170, CachedTokens: 64, CachedKnown: true,
			AnswerTokens: 9, Code: 200, TTFT: 12*time.Millisecond + 345*time.Microsecond, Duration: time.Second},
		Request{Arrived: at(1.25), Model: "other", Bytes: 700, Blocks: []prompt.Block{0xdeadbeefdeadbeef, 7}, Code: 503},
		Request{Arrived: at(2), Model: "secret-model", Session: 5, Code: 499},
		Request{Arrived: at(3), Bytes: 100, ExtraBytes: 300, PromptTokens: 90, AnswerTokens: 1, Code: 200}, // a list
		Request{Arrived: at(3), Bytes: 100, ExtraBytes: 300, Code: 503},
	)
	got := read(t, r.file)
	want := []string{
		fmt.Sprintf(`{"warmroute_record":1,"started_ms":%d,"block_bytes":256,"block_tokens":64}`, r.encode.start.UnixMilli()),
		`{"timestamp":1.5,"input_length":170,"input_bytes":700,"counted":true,"output_length":9,"cached_tokens":64,"code":200,"stream":true,"model":0,"session":1,"ttft_ms":12.345,"duration_ms":1000,"hash_ids":[0,1]}`,
		`{"timestamp":1.25,"input_length":175,"input_bytes":700,"output_length":0,"code":503,"stream":false,"model":1,"duration_ms":0,"hash_ids":[0,2]}`,
		`{"timestamp":2,"input_length":0,"input_bytes":0,"output_length":0,"code":499,"stream":false,"model":0,"session":2,"duration_ms":0,"hash_ids":[]}`,
		`{"timestamp":3,"input_length":90,"input_bytes":100,"extra_bytes":300,"output_length":1,"code":200,"stream":false,"duration_ms":0,"hash_ids":[]}`,
		`{"timestamp":3,"input_length":100,"input_bytes":100,"extra_bytes":300,"output_length":0,"code":503,"stream":false,"duration_ms":0,"hash_ids":[]}`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if info, err := os.Stat(r.file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestTheLongestLineIsBounded(t *testing.T) {
	e := newEncoder(time.Now(), 64)
	e.blocks.next, e.sessions.next, e.models.next = 1<<40-mostBlocks, 1<<40, 1<<40 // after years
	q := Request{
		Arrived: e.start.Add(mostStamp - time.Microsecond), Model: "m", Session: 1, Bytes: mostBytes / 2, ExtraBytes: mostBytes / 2,
		Plain: true, Blocks: make([]prompt.Block, mostBlocks), PromptTokens: mostPrompt, CachedTokens: math.MaxInt, CachedKnown: true,
		AnswerTokens: mostAnswer, Code: 200, TTFT: math.MaxInt64, Duration: math.MaxInt64,
	}
	for i := range q.Blocks {
		q.Blocks[i] = prompt.Block(i)
	}
	if line := e.request(&q); !e.fits(&q) || len(line) > longestLine || len(line) < longestLine*3/4 {
		t.Errorf("a line of %d bytes, of at most %d", len(line), longestLine)
	}
}

// A clock that is set while the proxy runs must not move requests: both times
// have to have a monotonic reading.
func TestStampsAreOfTheMonotonicClock(t *testing.T) {
	if e := newEncoder(time.Now(), 256); e.start == e.start.Round(0) {
		t.Errorf("the start %v has none", e.start)
	}
}

func TestNumbersAreBoundedAndNeverGivenTwice(t *testing.T) {
	n := numbers[int]{most: 100}
	given := map[uint64]int{}
	last := map[int]uint64{}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		k := rng.IntN(1000)
		if rng.IntN(2) == 0 {
			k = rng.IntN(5) // seen all the time
		}
		id := n.of(k)
		if owner, taken := given[id]; taken && owner != k {
			t.Fatalf("%d has the number that %d had", k, owner)
		}
		if before, known := last[k]; known && k < 5 && before != id {
			t.Fatalf("%d was forgotten, though it is seen all the time", k)
		}
		given[id], last[k] = k, id
		if len(n.young) > 100 || len(n.old) > 100 {
			t.Fatalf("%d and %d are known", len(n.young), len(n.old))
		}
	}
	if len(given) < 2000 {
		t.Errorf("only %d numbers for things that were forgotten again and again", len(given))
	}
}

// many makes requests whose lines are all alike in length.
func many(n int) []Request {
	out := make([]Request, n)
	for i := range out {
		out[i] = Request{Bytes: 1000 + i, Code: 200, Blocks: []prompt.Block{1, 2, 3}}
	}
	return out
}

// sizes reads files as one recording and returns the input_bytes of its
// requests, each file of which begins with a header.
func sizes(t *testing.T, names ...string) (all []int) {
	t.Helper()
	for _, name := range names {
		for i, line := range read(t, name) {
			var f struct {
				Version int `json:"warmroute_record"`
				Bytes   int `json:"input_bytes"`
			}
			if err := json.Unmarshal([]byte(line), &f); err != nil {
				t.Fatalf("%s line %d: %v", name, i+1, err)
			}
			if (i == 0) != (f.Version == 1) {
				t.Errorf("%s line %d: %s", name, i+1, line)
			}
			if i > 0 {
				all = append(all, f.Bytes)
			}
		}
	}
	return all
}

func TestFullFilesAreRenamedAndTheOldestGo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	r := newRecorder(t, file, 2000, 2)
	r.run(many(60)...)
	got := sizes(t, file+".2", file+".1", file)
	for i, n := range got {
		if n != got[0]+i {
			t.Fatalf("requests %v: one is missing or out of order", got)
		}
	}
	if got[len(got)-1] != 1059 || got[0] == 1000 {
		t.Errorf("the requests from %d to %d are kept, want the last", got[0], got[len(got)-1])
	}
	if left, _ := filepath.Glob(file + "*"); len(left) != 3 {
		t.Errorf("files %v, want 3", left)
	}
	for _, name := range []string{file + ".2", file + ".1", file} {
		if info, err := os.Stat(name); err != nil || info.Size() > 2000 {
			t.Errorf("%v, %v: larger than 2000 bytes", info, err)
		}
	}
	if n := r.dropped.Load(); n != 0 {
		t.Errorf("%d dropped", n)
	}
}

func TestNoFullFileIsKeptWhenNoneShallBe(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	newRecorder(t, file, 1000, 0).run(many(30)...)
	if left, _ := filepath.Glob(file + "*"); len(left) != 1 || len(sizes(t, file)) == 0 {
		t.Errorf("files %v, want one", left)
	}
}

func TestANewRunGoesOnBehindTheOld(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	newRecorder(t, file, 1<<20, 1).run(many(2)...)
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString(`{"timestamp":12,"inp`) // a crash in mid-line
	f.Close()
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	newRecorder(t, file, 1<<20, 1).run(many(1)...)
	got := read(t, file)
	if len(got) != 5 || !strings.HasPrefix(got[0], mark) || !strings.HasPrefix(got[3], mark) || !json.Valid([]byte(got[4])) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestAFileOfAnothersIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	f := func(name, content, want string) {
		t.Helper()
		file := filepath.Join(dir, name)
		if content != "" {
			if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		_, err := New(Options{File: file, MaxBytes: 1 << 20, BlockBytes: 256})
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
	f("notes", "do not lose this\n", "no recording")
	f("absent/traffic", "", "no such file")
	f(".", "", "directory")
}

// Two that write one file would cut off and overwrite each other's lines. (A
// lock is an opened file's, so that two in one process are as good as two processes.)
func TestAFileThatAnotherRecordsToIsLeftAlone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	r := newRecorder(t, file, 2000, 2)
	refused := func(when string) {
		t.Helper()
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, err = New(Options{File: file, MaxBytes: 1 << 20, BlockBytes: 256})
		if err == nil || !strings.Contains(err.Error(), "another process records to "+file) || !strings.Contains(err.Error(), "choose another file") {
			t.Errorf("%s: error %v", when, err)
		}
		if after, _ := os.ReadFile(file); !bytes.Equal(before, after) {
			t.Errorf("%s: the file changed", when)
		}
	}
	refused("at once")
	requests := many(60)
	for i := range requests {
		if lost, err := r.out.add(r.encode.request(&requests[i]), r.encode.header); lost > 0 || err != nil {
			t.Fatal(lost, err)
		}
		if _, err := r.out.flush(); err != nil {
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

func TestAFileThatWasRenamedWhileItWasOpenedIsNotRecordedTo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "traffic")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	f := files{path: path}
	if err := f.own(file); err != nil {
		t.Error(err)
	}
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := f.own(file); err == nil {
		t.Error("no error when nothing has the name")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.own(file); err == nil || !strings.Contains(err.Error(), "renamed") {
		t.Errorf("error %v when another file has the name", err)
	}
}

func TestWhatTheDiskDoesNotTakeIsCounted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	r := newRecorder(t, file, 2000, 1)
	// Nothing can be renamed to a folder that is not empty.
	if err := os.MkdirAll(filepath.Join(file+".1", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.run(many(40)...)
	kept := len(sizes(t, file))
	if lost := int(r.dropped.Load()); kept == 0 || lost == 0 || kept+lost != 40 {
		t.Errorf("%d recorded, %d dropped, want 40 in all", kept, lost)
	}
	if n := strings.Count(r.log.String(), "traffic is not recorded"); n != 1 {
		t.Errorf("told %d times:\n%s", n, &r.log)
	}
}

// Requests that are cut off at the end of a shutdown end after the recorder.
func TestAFileIsTakenOverWhenTheProcessBeforeLetsGoOfIt(t *testing.T) {
	first := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<30, 1)
	second := &recorder{file: first.file}
	var err error
	second.Recorder, err = New(Options{
		File: first.file, MaxBytes: 1 << 30, BlockBytes: 256, Wait: true,
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
		q := second.Begin()
		q.Bytes = 256
		second.Add(q)
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

func TestWhatComesAfterTheEndIsCounted(t *testing.T) {
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
				q := r.Begin()
				q.Bytes, q.Blocks = 256, append(q.Blocks, 1)
				r.Add(q)
			}
		})
	}
	r.Run(ctx)
	late.Wait()
	after := r.dropped.Load()
	r.Add(r.Begin())
	if n := r.dropped.Load(); n != after+1 {
		t.Errorf("%d dropped after one more, want %d", n, after+1)
	}
	if kept := len(sizes(t, r.file)); kept+int(after) != 4*each {
		t.Errorf("%d recorded, %d dropped, want %d in all", kept, after, 4*each)
	}
	if n := r.queued.Load(); n != 0 || len(r.queue) != 0 {
		t.Errorf("%d requests and %d blocks are still queued", len(r.queue), n)
	}
}

func TestTooManyAtOnceAreDroppedAndNobodyWaits(t *testing.T) {
	f := func(name string, blocks, want int) {
		t.Helper()
		r := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<30, 1)
		for range want + 100 { // nobody writes
			q := r.Begin()
			q.Blocks, q.Bytes = make([]prompt.Block, blocks), mostBytes
			r.Add(q)
		}
		if n := r.dropped.Load(); n != 100 {
			t.Errorf("%s: %d dropped, want 100", name, n)
		}
		r.run()
		if n := len(sizes(t, r.file)); n != want {
			t.Errorf("%s: %d recorded, want %d", name, n, want)
		}
		if n := r.queued.Load(); n != 0 {
			t.Errorf("%s: %d blocks counted at the end", name, n)
		}
	}
	f("short prompts", 1, queueRequests)
	f("long prompts", mostBlocks+5, queueBlocks/mostBlocks)
}
