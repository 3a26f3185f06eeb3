package recorder

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
			if (i == 0) != (f.Version == version) {
				t.Errorf("%s line %d: %s", name, i+1, line)
			}
			if i > 0 {
				all = append(all, f.Bytes)
			}
		}
	}
	return all
}

func TestRotate(t *testing.T) {
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

func TestRotateKeepNone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "traffic")
	newRecorder(t, file, 1000, 0).run(many(30)...)
	if left, _ := filepath.Glob(file + "*"); len(left) != 1 || len(sizes(t, file)) == 0 {
		t.Errorf("files %v, want one", left)
	}
}

func TestContinueFile(t *testing.T) {
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
	if len(got) != 5 || !strings.HasPrefix(got[0], fileMark) || !strings.HasPrefix(got[3], fileMark) || !json.Valid([]byte(got[4])) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestFullDisk(t *testing.T) {
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
	if n := strings.Count(r.log.String(), "recording failed"); n != 1 {
		t.Errorf("told %d times:\n%s", n, &r.log)
	}
}
