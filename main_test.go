package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestExitStatusTellsAMistakeFromAFailure(t *testing.T) {
	f := func(want int, args ...string) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		if got := run(t.Context(), args, &stdout, &stderr); got != want {
			t.Errorf("%q: status %d, want %d; stderr %q", args, got, want, stderr.String())
		}
		if want != 0 && (stderr.Len() == 0 || stdout.Len() != 0) {
			t.Errorf("%q: stdout %q, stderr %q: errors belong on stderr", args, stdout.String(), stderr.String())
		}
	}
	f(0)
	f(0, "--help")
	f(0, "check", "--help")
	f(0, "version")
	f(2, "sevre")
	f(2, "--bogus")
	f(2, "version", "extra")
	f(2, "check")
	f(1, "health", "http://127.0.0.1:1/livez")
}

// What the help shows as an example can be typed.
func TestHelpHasExamplesThatWork(t *testing.T) {
	t.Setenv("VLLM_API_KEY", "k")
	for _, cmd := range append(newRootCommand().Commands(), newRootCommand()) {
		examples := 0
		for line := range strings.Lines(cmd.Example) {
			_, typed, found := strings.Cut(strings.Replace(" "+line, "<(", " ", 1), " warmroute ")
			if !found {
				t.Errorf("%s: no command line: %s", cmd.Name(), line)
				continue
			}
			typed, _, _ = strings.Cut(typed, " | ")
			typed, _, _ = strings.Cut(typed, " > ")
			typed, _, _ = strings.Cut(typed, ")")
			examples++
			root := newRootCommand()
			of, args, err := root.Find(strings.Fields(typed))
			if err != nil || of == root {
				t.Errorf("%s: %v in %s", cmd.Name(), err, line)
			} else if cmd.HasParent() && of.Name() != cmd.Name() {
				t.Errorf("%s: an example of %s", cmd.Name(), of.Name())
			} else if err := of.ParseFlags(args); err != nil {
				t.Errorf("%s: %v in %s", cmd.Name(), err, line)
			} else if err := of.ValidateArgs(of.Flags().Args()); err != nil {
				t.Errorf("%s: %v in %s", cmd.Name(), err, line)
			}
		}
		if examples == 0 {
			t.Errorf("%s has no example", cmd.Name())
		}
	}
}

func TestHelpFits(t *testing.T) {
	for _, cmd := range append(newRootCommand().Commands(), newRootCommand()) {
		var help bytes.Buffer
		run(t.Context(), []string{"help", cmd.Name()}, &help, &help)
		for line := range strings.Lines(help.String()) {
			if n := utf8.RuneCountInString(line) - 1; n > 110 {
				t.Errorf("%s: %d columns: %s", cmd.Name(), n, line)
			}
			if strings.Contains(line, "(default )") || strings.Contains(line, "<nil>") || strings.Contains(line, "%!") {
				t.Errorf("%s: %s", cmd.Name(), line)
			}
		}
	}
}

func TestHealthSucceedsOnlyOn200(t *testing.T) {
	f := func(code, want int) {
		t.Helper()
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		defer server.Close()
		var stderr bytes.Buffer
		if got := run(t.Context(), []string{"health", server.URL}, &stderr, &stderr); got != want {
			t.Errorf("answer %d: status %d, want %d; %s", code, got, want, stderr.String())
		}
	}
	f(http.StatusOK, 0)
	f(http.StatusServiceUnavailable, 1)
}

func TestVersionSaysWhatItWasBuiltFromAndFor(t *testing.T) {
	var output bytes.Buffer
	run(t.Context(), []string{"version"}, &output, &output)
	want := regexp.MustCompile(`^warmroute \S+ commit ([0-9a-f]{40}|unknown) go1\S* ` + runtime.GOOS + "/" + runtime.GOARCH + "\n$")
	if !want.MatchString(output.String()) {
		t.Errorf("got %q", output.String())
	}
}
