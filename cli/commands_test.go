package cli_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"warmroute/cli"
	"warmroute/config"
	labcli "warmroute/lab/cli"
	"warmroute/lab/policies"
)

// configs returns what the shipped binary has. It is read once, since tests change the working
// directory.
var configs = sync.OnceValue(func() config.Loader {
	data, err := os.ReadFile("../config.yaml")
	if err != nil {
		panic(err)
	}
	return config.Loader{Defaults: data, Policies: policies.All()}
})

// execute runs a command line of the shipped binary and returns its exit status and output.
func execute(ctx context.Context, args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = cli.Run(ctx, args, configs(), labcli.Commands(configs()), &out, &errs)
	return status, out.String(), errs.String()
}

func newRootCommand() *cobra.Command {
	return cli.NewRootCommand(configs(), labcli.Commands(configs()))
}

func allCommands() []*cobra.Command {
	root := newRootCommand()
	return append(root.Commands(), root)
}

func TestHelpExamplesAreValid(t *testing.T) {
	t.Setenv("VLLM_API_KEY", "k")
	for _, cmd := range allCommands() {
		examples := 0
		for line := range strings.Lines(cmd.Example) {
			_, typed, found := strings.Cut(" "+line, " warmroute ")
			if !found {
				t.Errorf("%s: not a command line: %s", cmd.Name(), line)
				continue
			}
			typed, _, _ = strings.Cut(typed, " | ")
			examples++
			root := newRootCommand()
			of, args, err := root.Find(strings.Fields(typed))
			if err != nil || of == root {
				t.Errorf("%s: %v in %s", cmd.Name(), err, line)
			} else if cmd.HasParent() && of.CommandPath() != cmd.CommandPath() && of.Parent().CommandPath() != cmd.CommandPath() {
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
	for _, cmd := range allCommands() {
		_, help, _ := execute(t.Context(), "help", cmd.Name())
		for line := range strings.Lines(help) {
			if n := utf8.RuneCountInString(line) - 1; n > 110 {
				t.Errorf("%s: %d columns: %s", cmd.Name(), n, line)
			}
			if strings.Contains(line, "(default )") || strings.Contains(line, "(default [])") || strings.Contains(line, "<nil>") ||
				strings.Contains(line, "%!") {
				t.Errorf("%s: %s", cmd.Name(), line)
			}
		}
	}
}

func TestErrorMessages(t *testing.T) {
	configs()
	t.Chdir(t.TempDir())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	usedPort := listener.Addr().String()
	_, port, _ := net.SplitHostPort(usedPort)
	portInUse := usedPort + " is in use: stop the listener or the connection that has the port (ss -tanp 'sport = :" + port +
		"' lists it), or set another address with --"
	for name, content := range map[string]string{"bad.yaml": "listn: :80\npoll: {interval: 5}\n", "empty.key": "\n", "bad.jsonl": "{}\n"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"--bogus", 2, "unknown flag: --bogus"},
		{"version now", 2, `unknown command "now" for "warmroute version"`},
		{"check --config bad.yaml http://a:8000", 2,
			"listn: unknown setting; did you mean listen?\npoll.interval: 5 has no unit; write a duration such as 250ms, 5s or 1m30s\n"},

		{"serve", 2, "backends: the list is empty; name at least one vLLM server, as in serve http://127.0.0.1:8000, or list backends in the " +
			"file; it may be empty with backends_file, state_file or registration\n"},
		{"serve --lisen :1", 2, "unknown flag: --lisen"},
		{"serve --listen", 2, "--listen has no value: it takes ADDRESS (listen on ADDRESS for clients (default :8080))"},
		{"serve --listen 8080 http://a:8000", 2, "listen (from --listen): \"8080\" is not an address such as :8080 or 127.0.0.1:8080\n"},
		{"serve --config none.yaml", 2, "--config none.yaml: no such file\n"},
		{"serve --config .", 2, "--config . is a directory, expected a file\n"},
		{"serve 10.0.0.5:8000", 2, "backends[0].url (from the command line): backend URL \"10.0.0.5:8000\": no scheme; write http://HOST:PORT " +
			"or https://HOST:PORT\n"},
		{"serve --policy prefx http://a:8000", 2, "routing.policy (from --policy): unknown policy \"prefx\"; did you mean prefix?\n"},
		{"serve --log-level error --listen " + usedPort + " http://127.0.0.1:1", 1, portInUse + "listen\n"},
		{"serve --log-level error --listen 127.0.0.1:0 --admin " + usedPort + " http://127.0.0.1:1", 1, portInUse + "admin\n"},
		{"serve --log-level error --listen 192.0.2.1:8080 http://127.0.0.1:1", 1,
			"192.0.2.1:8080 is not an address of this machine: set another address with --listen\n"},

		{"demo --for 30", 2, `--for: "30" is not a duration such as 250ms, 30s or 1m30s`},
		{"demo --backends many", 2, `--backends: "many" is not a whole number`},
		{"demo --backends 0", 2, "--backends 0 is not between 1 and 64"},
		{"demo --for -1s", 2, "--for -1s is negative"},
		{"demo --listen " + usedPort, 1, portInUse + "listen\n"},

		{"sim --listen here", 2, `--listen: "here" is not an address such as :8080 or 127.0.0.1:8080`},
		{"sim --listen " + usedPort, 1, portInUse + "listen\n"},
		{"sim --script none.json", 2, "--script: open none.json: no such file or directory"},
		{"sim --scheduling-policy lifo", 2, `--scheduling-policy: "lifo" is invalid: choose fcfs or priority`},
		{"sim --max-num-seqs -1", 2, "sequence limit must be above 0"},
		{"sim --kv-events ipc:///tmp/kv", 2, `endpoint "ipc:///tmp/kv" of KV events is neither a port nor tcp://HOST:PORT`},
		{"sim --listen 127.0.0.1:0 --kv-events tcp://" + usedPort, 1, portInUse + "kv-events\n"},

		{"replay", 2, "name one of --from URL, --trace FILE and --workload agentic|hot|chats|documents"},
		{"replay --trace none.jsonl", 2, "--trace: open none.jsonl: no such file or directory"},
		{"replay --trace bad.jsonl", 2, "--trace: parse bad.jsonl: trace line 1: timestamp is missing"},
		{"replay --workload hot --load much", 2, `--load: "much" is not a list of numbers such as 0.5,1`},
		{"replay --workload hott", 2, `--workload: unknown workload "hott"; choose one of agentic, hot, chats, documents`},

		{"bench", 2, "--url is missing: name one or more endpoints, such as --url http://127.0.0.1:8080"},
		{"bench http://a", 2, `unknown command "http://a" for "warmroute bench"`},
		{"bench --url a:80", 2, `--url: "a:80": no scheme; write http://HOST:PORT or https://HOST:PORT`},
		{"bench --url http://u:secret@a", 2, `--url: "http://***@a": user and password are not supported; use --api-key-file instead`},
		{"bench --url http://a --concurrency 0", 2, "--concurrency 0 is not between 1 and 10000"},
		{"bench --url http://a --for 1ms", 2, "--for 1ms is not between 1s and 24h"},
		{"bench --url http://a --rounds 0", 2, "--rounds 0 is not between 1 and 99"},
		{"bench --url http://a --api-key-file none", 2, "--api-key-file: open none: no such file or directory"},
		{"bench --url http://a --api-key-file empty.key", 2, "--api-key-file: empty.key is empty"},
		{"bench --url http://a --api-key-env NO_SUCH_KEY", 2, "--api-key-env: NO_SUCH_KEY is empty"},
		{"bench --url http://a --for 5s --conversations 9", 2, "--for and --conversations exclude each other"},
		{"bench --url http://127.0.0.1:1", 1, "connect to http://127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused: check that " +
			"the server runs at this address\n"},

		{"health --policy prefix", 2, "unknown flag: --policy"},
		{"health http://127.0.0.1:1/livez", 1, "http://127.0.0.1:1/livez: dial tcp 127.0.0.1:1: connect: connection refused\n"},
	} {
		status, stdout, stderr := execute(t.Context(), strings.Fields(c.args)...)
		want := c.want
		isConfigError := status == 2 && strings.HasSuffix(want, "\n")
		if name, _, _ := strings.Cut(c.args, " "); !strings.HasSuffix(want, "\n") {
			want += "\nRun '" + strings.TrimSuffix("warmroute "+name, " --bogus") + " --help' for usage.\n"
		}
		if !isConfigError {
			want = "warmroute: " + want
		}
		if status != c.status || stderr != want || stdout != "" {
			t.Errorf("warmroute %s\nstatus %d, want %d\ngot  %q\nwant %q\nstdout %q", c.args, status, c.status, stderr, want, stdout)
		}
	}
}

func TestHelpGoesToStdout(t *testing.T) {
	for _, args := range [][]string{{}, {"help"}, {"--help"}, {"help", "bench"}, {"bench", "--help"}, {"bench", "-h"}, {"version"},
		{"--version"}, {"completion", "zsh"}} {
		if status, stdout, stderr := execute(t.Context(), args...); status != 0 || stdout == "" || stderr != "" {
			t.Errorf("%q: status %d, stdout %q, stderr %q", args, status, stdout, stderr)
		}
	}
}
