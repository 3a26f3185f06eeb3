package cli

import (
	"os"
	"strings"
	"testing"
)

// runCheck runs "warmroute check", with a configuration file unless yaml is empty.
func runCheck(t *testing.T, yaml string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	args = append([]string{"check"}, args...)
	if yaml != "" {
		t.Chdir(t.TempDir())
		if err := os.WriteFile("test.yaml", []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", "test.yaml")
	}
	return execute(t.Context(), t, args...)
}

func TestCheckOutput(t *testing.T) {
	key := "keys: [{name: a, sha256: " + strings.Repeat("a", 64) + "}]"
	for _, c := range []struct {
		yaml           string
		args           []string
		status         int
		stdout, stderr string
	}{
		{"", []string{"http://10.0.0.1:8000", "http://10.0.0.2:8000", "--policy", "random"}, 0, "ok: 2 backends, policy random, listen :8080\n",
			""},
		{"backends: [\"http://10.0.0.1:8000\"]\n" + key, nil, 0, "ok: 1 backend, policy prefix, listen :8080, 1 key\n", ""},
		{"backends: [\"http://10.0.0.1:8000\"]\nadmin: \":9090\"", nil, 0, "ok: 1 backend, policy prefix, listen :8080\n",
			"warning: admin: :9090 is reachable from other machines"},
		{"backends: [\"http://10.0.0.1:8000\", {url: \"http://10.0.0.2:8000\", role: decode}, {url: \"http://10.0.0.3:8000\", role: prefill}]",
			nil, 0,
			"ok: 3 backends (1 for prefill, 1 for decode), policy prefix, listen :8080\n", ""},
		{"", []string{"http://no-host.invalid:8000"}, 0, "ok: 1 backend, policy prefix, listen :8080\n",
			"warning: no-host.invalid:8000: no address now: "},
		{"backends: [{url: \"http://no-host.invalid:8000\", dns: off}]", nil, 0, "ok: 1 backend, policy prefix, listen :8080\n",
			"warning: no-host.invalid:8000: no address now: "},
		{"listen: 8080\nadmin: 9090", nil, 2, "", "listen: expected a string, got a number; put it in quotes\nadmin: expected a string"},
		{"", []string{"--lisen", ":1"}, 2, "", "warmroute: unknown flag: --lisen\nRun 'warmroute check --help' for usage.\n"},
	} {
		status, stdout, stderr := runCheck(t, c.yaml, c.args...)
		if status != c.status || stdout != c.stdout || !strings.HasPrefix(stderr, c.stderr) || (c.stderr == "") != (stderr == "") {
			t.Errorf("%s %q: status %d, stdout %q, stderr %q; want %d, %q, %q", c.yaml, c.args, status, stdout, stderr, c.status, c.stdout, c.stderr)
		}
	}
}
