package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
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

func TestHelpHasAnExampleOfEveryCommand(t *testing.T) {
	var help bytes.Buffer
	run(t.Context(), []string{"--help"}, &help, &help)
	examples, commands, _ := strings.Cut(help.String(), "Available Commands:\n")
	commands, _, _ = strings.Cut(commands, "\n\n")
	seen := map[string]bool{}
	for line := range strings.Lines(commands) {
		if name := strings.Fields(line)[0]; seen[name] {
			t.Errorf("%s is listed twice", name)
		} else {
			seen[name] = true
		}
		if name := strings.Fields(line)[0]; name != "help" && !strings.Contains(examples, "\n  warmroute "+name+" ") && !strings.Contains(examples, "\n  warmroute "+name+"\n") {
			t.Errorf("no example of %s in\n%s", name, examples)
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
