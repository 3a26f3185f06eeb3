package usage

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	noLog = slog.New(slog.DiscardHandler)
	noon  = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
)

// tokens are the counts of one request.
func tokens(n int64) *Counts { return &Counts{Requests: 1, PromptTokens: n, SavedPrefillSeconds: 0.5} }

// newTable returns a Table with the file, which it unlocks at the end of the test.
func newTable(t *testing.T, file string, hasPredecessor bool) *Table {
	t.Helper()
	table, err := New(Settings{File: file, Keep: 24 * time.Hour}, hasPredecessor)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(table.UnlockFile)
	return table
}

// total returns what a Table reports in all.
func total(t *testing.T, table *Table) Counts {
	t.Helper()
	r, err := table.Report(Query{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Total
}

func TestReport(t *testing.T) {
	table := NewInMemory()
	for i, r := range []struct {
		key, model string
		hour       int
	}{{"a", "x", 0}, {"a", "y", 0}, {"b", "x", 1}, {"a", "x", 2}} {
		table.Record(r.key, r.model, "", noon.Add(time.Duration(r.hour)*time.Hour+30*time.Minute), tokens(1<<i))
	}
	for _, c := range []struct{ from, to, by, want string }{
		{"", "", "", "a/x:9 b/x:4 a/y:2 since 12"},
		{"", "", "key", "a/-:11 b/-:4 since 12"},
		{"", "", "model", "-/x:13 -/y:2 since 12"},
		{"2026-11-27T13:00:00Z", "2026-11-27T14:00:00Z", "", "b/x:4 since 13"},
		{"2026-11-27T14:20:00Z", "", "key,model", "a/x:8 since 14"},
		{"", "2026-11-27", "", ""},
	} {
		q, err := ParseQuery(c.from, c.to, c.by)
		if err != nil {
			t.Fatal(err)
		}
		r, err := table.Report(q)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		name := func(s *string) string {
			if s == nil {
				return "-"
			}
			return *s
		}
		for _, s := range r.Rows {
			got = append(got, fmt.Sprintf("%s/%s:%d", name(s.Key), name(s.Model), s.PromptTokens))
		}
		if r.Since != nil {
			got = append(got, fmt.Sprint("since ", r.Since.Hour()))
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("from %q to %q by %q: got %s, want %s", c.from, c.to, c.by, text, c.want)
		}
	}
	if c := table.OfKey("a"); c.Requests != 3 || c.PromptTokens != 11 {
		t.Errorf("key a has used %+v", c)
	}
	for _, q := range [][3]string{{"yesterday"}, {"", "27.11.2026"}, {"2026-11-28", "2026-11-27"}, {"", "", "user"}} {
		if _, err := ParseQuery(q[0], q[1], q[2]); err == nil {
			t.Errorf("%q is accepted", q)
		}
	}
}

func TestCSV(t *testing.T) {
	table := NewInMemory()
	table.Record("a,b", "x", "", noon, &Counts{Requests: 2, Errors: 1, PromptTokens: 100, CachedTokens: 60, OutputTokens: 7,
		EstimatedTokens: 3, EstimatedCachedTokens: 4, QueueSeconds: 0.25, SavedPrefillSeconds: 1.5})
	r, err := table.Report(Query{ByKey: true})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := r.WriteCSV(&out); err != nil {
		t.Fatal(err)
	}
	want := strings.Join(csvHeader, ",") + "\n\"a,b\",,2,1,100,60,7,3,4,0.250,1.500\n"
	if out.String() != want {
		t.Errorf("got %s", out.String())
	}
}

// TestCSVFormulas expects that no name is a formula to a spreadsheet.
func TestCSVFormulas(t *testing.T) {
	table := NewInMemory()
	for _, name := range []string{"=cmd()", "+1", "-1", "@a", "\ta", "a=b"} {
		table.Record(name, name, "", noon, &Counts{Requests: 1})
	}
	r, err := table.Report(Query{ByKey: true, ByModel: true})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := r.WriteCSV(&out); err != nil {
		t.Fatal(err)
	}
	for _, cell := range []string{"'=cmd()", "'+1", "'-1", "'@a", "'\ta", "a=b"} {
		if !strings.Contains(out.String(), "\n"+cell+","+cell+",1,") {
			t.Errorf("no line for %q in %q", cell, out.String())
		}
	}
}

func TestRowsAreBounded(t *testing.T) {
	table := NewInMemory()
	const hours, each = 5, maxRows / 4
	for h := range hours {
		for i := range each {
			table.Record(fmt.Sprint("key ", i%100), fmt.Sprint("model ", h, i), "", noon.Add(time.Duration(h)*time.Hour), tokens(1))
		}
	}
	table.Record("another", "model", "", noon, tokens(1))
	if n := len(table.unsaved); n > maxRows+maxCoarseRows+1 {
		t.Errorf("%d rows", n)
	}
	if c := total(t, table); c.Requests != hours*each+1 {
		t.Errorf("%d requests, want %d", c.Requests, hours*each+1)
	}
}

func TestConcurrentSaves(t *testing.T) {
	file := filepath.Join(t.TempDir(), "usage")
	table := newTable(t, file, false)
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for i := range 50 {
				table.Record("a", "x", "", noon, tokens(1))
				if i%10 == 0 {
					table.Save(noLog)
					total(t, table)
				}
			}
		})
	}
	running.Wait()
	if c := total(t, table); c.Requests != 200 {
		t.Errorf("%d requests", c.Requests)
	}
}

// TestUpgradeSharesFile has both processes write by turns. The lock of the file goes to the successor.
func TestUpgradeSharesFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "usage")
	old := newTable(t, file, false)
	old.Record("a", "x", "", noon, tokens(1))
	if _, err := New(Settings{File: file}, false); err == nil || !strings.Contains(err.Error(), "another process writes") {
		t.Fatalf("a second process: %v", err)
	}
	old.Save(noLog)
	successor := newTable(t, file, true)
	old.UnlockFile()
	successor.Record("a", "x", "", noon, tokens(10))
	old.Record("a", "x", "", noon, tokens(100))
	successor.Save(noLog)
	old.Save(noLog)
	if !successor.tryLockFile() || !old.tryLockFile() {
		t.Error("the file is not locked")
	}
	if _, err := New(Settings{File: file}, false); err == nil {
		t.Error("the successor has no lock")
	}
	if c := total(t, successor); c.PromptTokens != 111 || c.Requests != 3 {
		t.Errorf("got %+v", c)
	}
	successor.UnlockFile()
	if c := total(t, newTable(t, file, false)); c.PromptTokens != 111 {
		t.Errorf("after a restart: %+v", c)
	}
}

// TestKill has a process end in the middle of a write: no more than that write is lost, and nothing counts twice.
func TestKill(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "usage")
	table := newTable(t, file, false)
	for i := range 3 {
		table.Record("a", fmt.Sprint("model ", i), "", noon, tokens(1))
		table.Save(noLog)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; n <= len(whole); n += 7 {
		killed := filepath.Join(folder, fmt.Sprint("killed ", n))
		if err := os.WriteFile(killed, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		rows := max(strings.Count(string(whole[:n]), "\n")-1, 0)
		next := newTable(t, killed, false)
		if c := total(t, next); c.Requests != int64(rows) {
			t.Fatalf("after %d bytes: %d requests, want %d", n, c.Requests, rows)
		}
		next.Record("a", "x", "", noon, tokens(1))
		next.Save(noLog)
		if c := total(t, next); c.Requests != int64(rows)+1 {
			t.Fatalf("after %d bytes and a save: %d requests, want %d", n, c.Requests, rows+1)
		}
		next.UnlockFile()
	}
}

// TestCrashOfMachine has a machine crash when the file was longer already than what is written.
func TestCrashOfMachine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "usage")
	table := newTable(t, file, false)
	table.Record("a", "x", "", noon, tokens(1))
	table.Save(noLog)
	table.UnlockFile()
	rows, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(rows, make([]byte, 5*maxLineBytes/2)...), 0o600); err != nil {
		t.Fatal(err)
	}
	next := newTable(t, file, false)
	next.Record("a", "x", "", noon, tokens(1))
	next.Save(noLog)
	if c := total(t, next); c.Requests != 2 {
		t.Errorf("%d requests, want 2", c.Requests)
	}
}

func TestCompaction(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	f, err := openFile(path, 24*time.Hour, true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.lock.Unlock()
	row := func(hour time.Time) []Row {
		return []Row{{hour, "a", "x", "", *tokens(1)}, {hour, "b", "x", "", *tokens(2)}}
	}
	for _, hour := range []time.Time{noon.Add(-48 * time.Hour), noon, noon.Add(time.Hour)} {
		for range 60 {
			if err := f.append(row(hour), noon); err != nil {
				t.Fatal(err)
			}
		}
	}
	count := func() (lines int, sum Counts) {
		t.Helper()
		lines = 1
		in, _, err := f.open()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		if _, err := Read(in, time.Time{}, time.Time{}, func(r *Row) { lines++; sum.Add(&r.Counts) }); err != nil {
			t.Fatal(err)
		}
		return lines, sum
	}
	if err := f.compactDaily(noon); err != nil {
		t.Fatal(err)
	}
	if lines, _ := count(); lines != 1+3*60*2 {
		t.Errorf("%d lines on the day of the file's begin", lines)
	}
	for range 2 { // the second time nothing is left to do
		if err := f.compactDaily(noon.Add(24 * time.Hour)); err != nil {
			t.Fatal(err)
		}
		if lines, sum := count(); lines != 5 || sum.Requests != 240 || sum.PromptTokens != 360 {
			t.Errorf("%d lines, %+v", lines, sum)
		}
		f.compactAfter = time.Time{}
	}
}

// TestFailedCompaction has a name that leaves no room for that of a temporary file.
func TestFailedCompaction(t *testing.T) {
	file := filepath.Join(t.TempDir(), strings.Repeat("a", 245))
	if err := os.WriteFile(file, []byte(fileMark+"\"compacted\":\"2020-01-01\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	table := newTable(t, file, false)
	table.Record("a", "x", "", noon, tokens(1))
	var logged strings.Builder
	table.Save(slog.New(slog.NewTextHandler(&logged, nil)))
	if !strings.Contains(logged.String(), "failed to compact usage") {
		t.Errorf("got %s", &logged)
	}
	if s := table.Status(); s.Err != nil || len(table.unsaved) > 0 {
		t.Errorf("the rows are not saved: %v", s.Err)
	}
	if c := total(t, table); c.Requests != 1 {
		t.Errorf("%d requests", c.Requests)
	}
}

func TestOtherFilesAreRefused(t *testing.T) {
	folder := t.TempDir()
	notes := filepath.Join(folder, "notes")
	if err := os.WriteFile(notes, []byte("do not lose this\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{notes, folder, filepath.Join(folder, "absent", "usage")} {
		if _, err := New(Settings{File: file}, false); err == nil {
			t.Errorf("%s is accepted", file)
		}
	}
	if text, _ := os.ReadFile(notes); string(text) != "do not lose this\n" {
		t.Errorf("got %q", text)
	}
}

func TestInvalidLinesAreIgnored(t *testing.T) {
	good := `{"hour":"2026-11-27T12:00:00Z","key":"a","model":"x","requests":1}` + "\n"
	text := fileMark + "\"compacted\":\"2026-11-27\"}\n" + good + "\x00\x00\x00\n" + `{"hour":"2026-11-27T12:00:00Z","requests":-1}` + "\n" +
		`{"hour":"yesterday"}` + "\n" + `{"hour":"2026-11-27T12:00:00Z","key":"` + strings.Repeat("a", maxLineBytes) + "\"}\n" +
		good + strings.TrimSuffix(good, "\n")
	n := int64(0)
	ignored, err := Read(strings.NewReader(text), time.Time{}, time.Time{}, func(r *Row) { n += r.Requests })
	if err != nil || n != 2 || ignored != 4 {
		t.Errorf("%d requests, %d lines ignored, %v", n, ignored, err)
	}
	if _, err := Read(strings.NewReader(good), time.Time{}, time.Time{}, func(*Row) {}); err == nil {
		t.Error("a file without the mark is accepted")
	}
}

func FuzzRead(f *testing.F) {
	f.Add(fileMark + "\"compacted\":\"2026-11-27\"}\n" + `{"hour":"2026-11-27T12:00:00Z","key":"a","model":"x","requests":1}` + "\n")
	f.Fuzz(func(t *testing.T, text string) {
		q := Query{ByKey: true, ByModel: true}
		r, _, err := q.Sum([]io.Reader{strings.NewReader(text)})
		if err == nil && !r.Total.isSum() {
			t.Errorf("got %+v", r.Total)
		}
	})
}

func (c *Counts) isSum() bool {
	return c.Requests >= 0 && c.PromptTokens >= 0 && c.SavedPrefillSeconds >= 0
}

func FuzzParseQuery(f *testing.F) {
	f.Add("2026-11-27", "2026-11-28T00:00:00+01:00", "key,model")
	f.Fuzz(func(t *testing.T, from, to, by string) {
		q, err := ParseQuery(from, to, by)
		if err == nil && !q.From.IsZero() && !q.To.IsZero() && !q.From.Before(q.To) {
			t.Errorf("got %+v", q)
		}
	})
}

// Requests by a name of models.names are counted by the name and the model; without a name, as before.
func TestModelNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	table := newTable(t, path, false)
	table.Record("a", "x", "", noon, tokens(1))
	table.Record("a", "x", "coder", noon, tokens(10))
	table.Record("a", "y", "coder", noon, tokens(100))
	table.Save(noLog)
	for by, want := range map[string]string{
		"":                 "a,x: 11;a,y: 100",
		"model_name":       "coder: 110;: 1",
		"model,model_name": "x,coder: 10;x,: 1;y,coder: 100",
	} {
		q, err := ParseQuery("", "", by)
		if err != nil {
			t.Fatal(err)
		}
		report, err := table.Report(q)
		if err != nil {
			t.Fatal(err)
		}
		var rows []string
		for _, s := range report.Rows {
			var labels []string
			for _, label := range []*string{s.Key, s.Model, s.ModelName} {
				if label != nil {
					labels = append(labels, *label)
				}
			}
			rows = append(rows, fmt.Sprintf("%s: %d", strings.Join(labels, ","), s.PromptTokens))
		}
		slices.Sort(rows)
		wanted := strings.Split(want, ";")
		slices.Sort(wanted)
		if !slices.Equal(rows, wanted) {
			t.Errorf("by %q: got %q, want %q", by, rows, wanted)
		}
		var csv bytes.Buffer
		if err := report.WriteCSV(&csv); err != nil || strings.Contains(csv.String(), "model_name") != (by != "") {
			t.Errorf("by %q: %s, %v", by, &csv, err)
		}
	}
	rows, err := os.ReadFile(path)
	if err != nil || strings.Count(string(rows), `"model_name":"coder"`) != 2 {
		t.Errorf("%s, %v", rows, err)
	}
}
