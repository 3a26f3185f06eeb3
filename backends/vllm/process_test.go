package vllm

import (
	"os"
	"strings"
	"testing"
)

func TestParseProcess(t *testing.T) {
	metrics, err := os.ReadFile("testdata/metrics-0.32.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := ParseProcess(metrics), (Process{1.79519978485e+09, 20.439999999999998, 9.862144e+08}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := ParseProcess([]byte("process_start_time_seconds x\n\x00{\n")); got != (Process{}) {
		t.Errorf("of lines that cannot be read: %v", got)
	}
}

func TestIsSameProcess(t *testing.T) {
	p := Process{StartTime: 100, CPUSeconds: 20, ResidentBytes: 1000}
	later := Process{StartTime: 100, CPUSeconds: 20.02, ResidentBytes: 1200}
	for _, c := range []struct {
		name                   string
		before, between, after Process
		want, certain          bool
	}{
		{"idle", p, p, p, true, true},
		{"working", p, Process{100, 20.01, 1100}, later, true, true},
		{"another start", p, Process{100.01, 20.01, 1100}, later, false, true},
		{"started together", p, Process{100, 19.5, 1100}, later, false, true},
		{"other memory", p, Process{100, 20.01, 1300}, later, false, false},
		{"restarted meanwhile", p, p, Process{200, 1, 1000}, false, true},
		{"nothing reported", Process{}, Process{}, Process{}, false, true},
		{"CPU time not reported", Process{StartTime: 100}, Process{StartTime: 100}, Process{StartTime: 100}, false, true},
	} {
		if got, certain := IsSameProcess(c.before, c.between, c.after); got != c.want || certain != c.certain {
			t.Errorf("%s: %v, certain %v", c.name, got, certain)
		}
	}
}

func FuzzParseProcess(f *testing.F) {
	f.Add([]byte("process_start_time_seconds 1\n"))
	f.Fuzz(func(t *testing.T, metrics []byte) { ParseProcess(metrics) })
}

func TestParseVersion(t *testing.T) {
	for body, want := range map[string]string{
		`{"version":"0.32.0"}`: "0.32.0",
		`{"version":"0.33.1.dev12+g0a1b2c3d4.d20260801","other":1}`: "0.33.1.dev12+g0a1b2c3d4.d20260801",
		`{"version":""}`:         "",
		`{"version":5}`:          "",
		`{"version":"a\nb"}`:     "",
		`{"detail":"Not Found"}`: "",
		`<html>`:                 "",
		`{"version":"` + strings.Repeat("1", maxVersionBytes+1) + `"}`: "",
	} {
		if got, err := ParseVersion([]byte(body)); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", body, got, err)
		}
	}
}
