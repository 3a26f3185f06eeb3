package cli

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"

	"warmroute/config"
	"warmroute/lab/policies"
)

// testConfigs returns a loader with the defaults of config.yaml. That is read once, since tests
// change the working directory.
var testConfigs = sync.OnceValue(func() config.Loader {
	data, err := os.ReadFile("../config.yaml")
	if err != nil {
		panic(err)
	}
	return config.Loader{Defaults: data, Policies: policies.All()}
})

func TestMain(m *testing.M) {
	testConfigs()
	os.Exit(m.Run())
}

// execute runs a command line and returns its exit status and output.
func execute(ctx context.Context, t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = Run(ctx, args, testConfigs(), nil, &out, &errs)
	return status, out.String(), errs.String()
}

func TestExitStatus(t *testing.T) {
	f := func(want int, args ...string) {
		t.Helper()
		got, stdout, stderr := execute(t.Context(), t, args...)
		if got != want {
			t.Errorf("%q: status %d, want %d; stderr %q", args, got, want, stderr)
		}
		if want != 0 && (stderr == "" || stdout != "") {
			t.Errorf("%q: stdout %q, stderr %q: errors belong on stderr", args, stdout, stderr)
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

func TestHealthRequiresStatus200(t *testing.T) {
	f := func(code, want int) {
		t.Helper()
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		defer server.Close()
		if got, _, stderr := execute(t.Context(), t, "health", server.URL); got != want {
			t.Errorf("response %d: status %d, want %d; %s", code, got, want, stderr)
		}
	}
	f(http.StatusOK, 0)
	f(http.StatusServiceUnavailable, 1)
}

func TestVersion(t *testing.T) {
	_, output, _ := execute(t.Context(), t, "version")
	want := regexp.MustCompile(`^warmroute \S+ commit ([0-9a-f]{40}|unknown) go1\S* ` + runtime.GOOS + "/" + runtime.GOARCH + "\n$")
	if !want.MatchString(output) {
		t.Errorf("got %q", output)
	}
}

func TestHealthFailure(t *testing.T) {
	t.Setenv("WARMROUTE_LISTEN", "127.0.0.1:1")
	if status, _, stderr := execute(t.Context(), t, "health"); status != 1 || !strings.Contains(stderr, "127.0.0.1:1/livez") {
		t.Errorf("no listener: status %d, %s", status, stderr)
	}
	// Docker reserves other statuses.
	if status, _, stderr := execute(t.Context(), t, "health", "--config", "no-such.yaml"); status != 1 {
		t.Errorf("no such file: status %d, %s", status, stderr)
	}
}
