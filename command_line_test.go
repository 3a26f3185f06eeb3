package main

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
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.Dir = dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// What people type wrong: the exact words that they are answered, and the exit code.
func TestMistakesAreAnsweredWithWhatToDo(t *testing.T) {
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().String()
	for name, content := range map[string]string{"bad.yaml": "listn: :80\npoll: {interval: 5}\n", "empty.key": "\n", "bad.jsonl": "{}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	inUse := "warmroute: " + port + " is in use by another process; end that one (ss -ltnp shows it), or choose another address with --%s\n"
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"sevre", 2, "there is no command \"sevre\"; did you mean serve?\nsee warmroute help\n"},
		{"Serve", 2, "there is no command \"Serve\"; did you mean serve?\nsee warmroute help\n"},
		{"launch", 2, "there is no command \"launch\"\nsee warmroute help\n"},
		{"help launch", 2, "there is no command \"launch\"\nsee warmroute help\n"},
		{"http://a:8000 http://b:8000", 2, "\"http://a:8000\" is no command; write warmroute serve http://a:8000 http://b:8000\nsee warmroute help\n"},
		{"--bogus", 2, "there is no flag --bogus\nsee warmroute help\n"},
		{"--config x.yaml", 2, "--config comes behind a command: it is a flag of check, explain, replay, serve\nsee warmroute help\n"},
		{"completion", 2, "name the shell: warmroute completion bash, zsh or fish\nsee warmroute completion --help\n"},
		{"completion tcsh", 2, "name the shell: warmroute completion bash, zsh or fish\nsee warmroute completion --help\n"},
		{"version now", 2, "warmroute version takes no arguments, and was given \"now\"; a flag begins with --\nsee warmroute version --help\n"},

		{"serve", 2, "backends: the list is empty; name at least one vLLM server: serve http://127.0.0.1:8000, or a backends list in the file\n"},
		{"serve --lisen :1", 2, "there is no flag --lisen; did you mean --listen?\nsee warmroute serve --help\n"},
		{"serve -c x.yaml", 2, "there is no flag -c; flags have long names, and begin with --\nsee warmroute serve --help\n"},
		{"serve --kv-tokens 5", 2, "serve has no flag --kv-tokens; it is one of replay, vllmsim\nsee warmroute serve --help\n"},
		{"serve --listen", 2, "--listen is given without its value: --listen ADDRESS\nsee warmroute serve --help\n"},
		{"serve --listen 8080 http://a:8000", 2, "listen (from --listen): \"8080\" is not an address; write it like :8080 or 127.0.0.1:8080\n"},
		{"serve --config none.yaml", 2, "--config none.yaml: there is no such file\n"},
		{"serve --config .", 2, "--config . is a directory; name a file\n"},
		{"check --config bad.yaml http://a:8000", 2, "listn: unknown setting; did you mean listen?\npoll.interval: 5 has no unit; write it like 250ms, 5s or 1m30s\n"},
		{"serve 10.0.0.5:8000", 2, "backends[0].url (from the command line): backend URL \"10.0.0.5:8000\": no scheme; write http://HOST:PORT or https://HOST:PORT\n"},
		{"serve --policy prefx http://a:8000", 2, "routing.policy (from --policy): unknown value \"prefx\"; did you mean prefix?\n"},
		{"serve --log-level error --listen " + port + " http://127.0.0.1:1", 1, fmt.Sprintf(inUse, "listen")},
		{"serve --log-level error --listen 127.0.0.1:0 --admin " + port + " http://127.0.0.1:1", 1, fmt.Sprintf(inUse, "admin")},
		{"serve --log-level error --listen 192.0.2.1:8080 http://127.0.0.1:1", 1, "warmroute: 192.0.2.1:8080 is no address of this machine; choose another with --listen\n"},

		{"demo --for 30", 2, "--for 30 has no unit; write it like 30s, or 250ms, 5m, 1h\nsee warmroute demo --help\n"},
		{"demo --for soon", 2, "--for \"soon\" is no duration; write it like 250ms, 30s, 5m or 1h\nsee warmroute demo --help\n"},
		{"demo --backends many", 2, "--backends \"many\" is no whole number\nsee warmroute demo --help\n"},
		{"demo --backends 99999999999999999999", 2, "--backends 99999999999999999999 is too large\nsee warmroute demo --help\n"},
		{"demo --backends 0", 2, "--backends 0 is not between 1 and 64\nsee warmroute demo --help\n"},
		{"demo --for -1s", 2, "--for -1s is below 0; 0 goes on until Ctrl-C\nsee warmroute demo --help\n"},
		{"demo --json=perhaps", 2, "--json is true or false, not \"perhaps\"; true needs no value\nsee warmroute demo --help\n"},
		{"demo --listen " + port, 1, fmt.Sprintf(inUse, "listen")},

		{"vllmsim --listen here", 2, "--listen: \"here\" is not an address; write it like :8080 or 127.0.0.1:8080\n"},
		{"vllmsim --listen " + port, 1, fmt.Sprintf(inUse, "listen")},
		{"vllmsim --max-num-seqs -1", 2, "sequence limit must be above 0\nsee warmroute vllmsim --help\n"},
		{"vllmsim --speed fast", 2, "--speed \"fast\" is no number; write it like 0.9\nsee warmroute vllmsim --help\n"},

		{"replay", 2, "name one of --trace FILE and --workload agentic|hot|chats|documents\nsee warmroute replay --help\n"},
		{"replay --trace none.jsonl", 2, "--trace none.jsonl: there is no such file\nsee warmroute replay --help\n"},
		{"replay --trace bad.jsonl", 2, "--trace bad.jsonl: trace line 1: timestamp is missing\nsee warmroute replay --help\n"},
		{"replay --workload hott", 2, "--workload hott: there is none of that name; choose of agentic, hot, chats, documents\nsee warmroute replay --help\n"},

		{"bench", 2, "--url is missing: name one endpoint to measure, or several to compare, like --url http://127.0.0.1:8080\nsee warmroute bench --help\n"},
		{"bench http://a", 2, "warmroute bench takes no arguments, and was given \"http://a\"; a flag begins with --\nsee warmroute bench --help\n"},
		{"bench --url a:80", 2, "--url: \"a:80\": no scheme; write http://HOST:PORT or https://HOST:PORT\nsee warmroute bench --help\n"},
		{"bench --url http://u:secret@a", 2, "--url: \"http://***@a\": user and password are not used; use --api-key-file instead\nsee warmroute bench --help\n"},
		{"bench --url http://a --sessions 0", 2, "--sessions 0 is not between 1 and 10000\nsee warmroute bench --help\n"},
		{"bench --url http://a --for 1ms", 2, "--for 1ms is not between 1s and 24h\nsee warmroute bench --help\n"},
		{"bench --url http://a --rounds 0", 2, "--rounds 0 is not between 1 and 99\nsee warmroute bench --help\n"},
		{"bench --url http://a --api-key-file none", 2, "--api-key-file none: there is no such file\nsee warmroute bench --help\n"},
		{"bench --url http://a --api-key-file empty.key", 2, "--api-key-file: there is no key in empty.key\nsee warmroute bench --help\n"},
		{"bench --url http://a --api-key-env NO_SUCH_KEY", 2, "--api-key-env: there is no key in NO_SUCH_KEY\nsee warmroute bench --help\n"},
		{"bench --url http://a --for 5s --conversations 9", 2, "--for and --conversations both say when to end; name one\nsee warmroute bench --help\n"},
		{"bench --url http://127.0.0.1:1", 1, "warmroute: http://127.0.0.1:1 cannot be reached: dial tcp 127.0.0.1:1: connect: connection refused; is it running, and is that its address?\n"},

		{"health http://127.0.0.1:1/livez", 1, "warmroute: http://127.0.0.1:1/livez: dial tcp 127.0.0.1:1: connect: connection refused\n"},
	} {
		code, stdout, stderr := commandLine(t, dir, strings.Fields(c.args)...)
		if code != c.code || stderr != c.want || stdout != "" {
			t.Errorf("warmroute %s\nstatus %d, want %d\ngot  %q\nwant %q\nstdout %q", c.args, code, c.code, stderr, c.want, stdout)
		}
	}
}

func TestHelpGoesToStdoutAndEndsWith0(t *testing.T) {
	for _, args := range [][]string{{}, {"help"}, {"--help"}, {"help", "bench"}, {"bench", "--help"}, {"bench", "-h"}, {"version"}, {"--version"}, {"completion", "zsh"}} {
		if code, stdout, stderr := commandLine(t, "", args...); code != 0 || stdout == "" || stderr != "" {
			t.Errorf("%q: status %d, stdout %q, stderr %q", args, code, stdout, stderr)
		}
	}
}

// Ctrl-C ends what runs until then with 0.
func TestExitCodesAfterASignal(t *testing.T) {
	f := func(want int, begun string, signals int, args ...string) {
		t.Helper()
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
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
	f(0, "base URL", 1, "vllmsim", "--listen", "127.0.0.1:0")
	f(0, "listening", 1, "serve", "--listen", "127.0.0.1:0", "--admin", "", "http://127.0.0.1:1")
	f(0, "Live page", 1, "demo", "--backends", "1")
}
