package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// commandLine runs the program itself, and returns its exit code and what it printed.
func commandLine(t *testing.T, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // one that was understood may run for ever
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestServeAndDemoErrors(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().String()
	for name, content := range map[string]string{"bad.yaml": "listn: :80\npoll: {interval: 5}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	inUse := "warmroute: " + port + " is in use by another process: stop that one (ss -ltnp lists it), or set another address with --%s\n"
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"serve", 2, "backends: the list is empty; name at least one vLLM server, as in serve http://127.0.0.1:8000, or list backends in the file\n"},
		{"serve --lisen :1", 2, "warmroute: unknown flag: --lisen\nRun 'warmroute serve --help' for usage.\n"},
		{"serve --kv-tokens 5", 2, "warmroute: unknown flag: --kv-tokens\nRun 'warmroute serve --help' for usage.\n"},
		{"serve --listen", 2, "warmroute: flag needs an argument: --listen\nRun 'warmroute serve --help' for usage.\n"},
		{"serve --listen 8080 http://a:8000", 2, "listen (from --listen): \"8080\" is not an address such as :8080 or 127.0.0.1:8080\n"},
		{"serve --config none.yaml", 2, "--config none.yaml: no such file\n"},
		{"serve --config .", 2, "--config . is a directory, expected a file\n"},
		{"serve 10.0.0.5:8000", 2, "backends[0].url (from the command line): backend URL \"10.0.0.5:8000\": no scheme; write http://HOST:PORT or https://HOST:PORT\n"},
		{"serve --policy prefx http://a:8000", 2, "routing.policy (from --policy): unknown policy \"prefx\"; did you mean prefix?\n"},
		{"serve --log-level error --listen " + port + " http://127.0.0.1:1", 1, fmt.Sprintf(inUse, "listen")},
		{"serve --log-level error --listen 127.0.0.1:0 --admin " + port + " http://127.0.0.1:1", 1, fmt.Sprintf(inUse, "admin")},
		{"serve --log-level error --listen 192.0.2.1:8080 http://127.0.0.1:1", 1, "warmroute: 192.0.2.1:8080 is not an address of this machine: set another address with --listen\n"},
		{"demo --for 30", 2, "warmroute: invalid argument \"30\" for \"--for\" flag: time: missing unit in duration \"30\"\nRun 'warmroute demo --help' for usage.\n"},
		{"demo --backends many", 2, "warmroute: invalid argument \"many\" for \"--backends\" flag: strconv.ParseInt: parsing \"many\": invalid syntax\nRun 'warmroute demo --help' for usage.\n"},
		{"demo --backends 0", 2, "warmroute: --backends 0 is not between 1 and 64\nRun 'warmroute demo --help' for usage.\n"},
		{"demo --for -1s", 2, "warmroute: --for -1s is below 0; 0 goes on until Ctrl-C\nRun 'warmroute demo --help' for usage.\n"},
		{"demo --listen " + port, 1, fmt.Sprintf(inUse, "listen")},
	} {
		code, stdout, stderr := commandLine(t, dir, strings.Fields(c.args)...)
		if code != c.code || stderr != c.want || stdout != "" {
			t.Errorf("warmroute %s\nstatus %d, want %d\ngot  %q\nwant %q\nstdout %q", c.args, code, c.code, stderr, c.want, stdout)
		}
	}
}

// Ctrl-C ends what runs until then with 0.
func TestExitCodesAfterASignal(t *testing.T) {
	f := func(want int, begun string, signals int, args ...string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		said := &syncBuffer{}
		cmd.Stdout, cmd.Stderr = said, said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); !strings.Contains(said.String(), begun); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				cmd.Process.Kill()
				t.Fatalf("%q not within a minute in %s", begun, said.String())
			}
		}
		for range signals {
			cmd.Process.Signal(syscall.SIGINT)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != want {
			t.Errorf("%q: status %d, want %d; %s", args, code, want, said.String())
		}
	}
	f(0, "base URL", 1, "sim", "--listen", "127.0.0.1:0")
	f(0, "listening", 1, "serve", "--listen", "127.0.0.1:0", "--admin", "", "http://127.0.0.1:1")
	f(0, "Live page", 1, "demo", "--backends", "1")
}
