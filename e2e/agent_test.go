//go:build agent

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// agentTimeout is for a task that takes an agent four seconds. One that waits for a server other
// than the proxy takes longer.
const agentTimeout = 90 * time.Second

// agent is a coding agent and how it is pointed at a proxy.
type agent struct {
	endpoint string
	command  []string
	env      func(proxy string) []string
	files    func(proxy string) map[string]string // in the home folder
	calls    func(file string) (read, edit sim.ScriptedCall)
}

// agentCommand is where lab/agents/run installs the agents.
func agentCommand(name string) string { return "lab/agents/node_modules/.bin/" + name }

var agents = map[string]agent{
	"claude": {
		endpoint: "/v1/messages",
		command:  []string{"-p", "--allowedTools", "Read,Edit", "--", task},
		env: func(proxy string) []string {
			return []string{"ANTHROPIC_BASE_URL=" + proxy, "ANTHROPIC_API_KEY=none", "ANTHROPIC_MODEL=sim",
				"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "DISABLE_AUTOUPDATER=1", "DISABLE_TELEMETRY=1"}
		},
		calls: func(file string) (read, edit sim.ScriptedCall) {
			return scriptedCall("Read", map[string]any{"file_path": file}),
				scriptedCall("Edit", map[string]any{"file_path": file, "old_string": "wrold", "new_string": "world"})
		},
	},
	"codex": {
		endpoint: "/v1/responses",
		command:  []string{"exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task},
		files: func(proxy string) map[string]string {
			return map[string]string{".codex/config.toml": `model = "sim"
model_provider = "warmroute"
check_for_update_on_startup = false
[model_providers.warmroute]
name = "warmroute"
base_url = "` + proxy + `/v1"
wire_api = "responses"
[analytics]
enabled = false
`}
		},
		calls: func(file string) (read, edit sim.ScriptedCall) {
			return scriptedCall("exec_command", map[string]any{"cmd": "cat " + file}),
				scriptedCall("exec_command", map[string]any{"cmd": "sed -i s/wrold/world/ " + file})
		},
	},
}

const task = "Fix the typo in greeting.txt"

func scriptedCall(name string, arguments map[string]any) sim.ScriptedCall {
	b, err := json.Marshal(arguments)
	if err != nil {
		panic(err) // strings always marshal
	}
	return sim.ScriptedCall{Name: name, Arguments: b}
}

// TestAgentEditsFile has each agent fix a typo. The replicas play the model: they ask for the
// file, then for the edit. All turns have to reach one replica, and to be expected to find
// there what it reports as cached.
func TestAgentEditsFile(t *testing.T) {
	requireLoopbackOnly(t)
	for name, a := range agents {
		t.Run(name, func(t *testing.T) {
			home, work := t.TempDir(), t.TempDir()
			file := filepath.Join(work, "greeting.txt")
			writeFileAt(t, file, "hello wrold\n")
			read, edit := a.calls(file)
			script := sim.Script{
				{Text: "I read the file.", ToolCalls: []sim.ScriptedCall{read}},
				{ToolCalls: []sim.ScriptedCall{edit}},
				{Text: "I fixed the typo."},
			}
			fleet := &simFleet{}
			for range 3 {
				url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 5}, Script: script}, "127.0.0.1:0")
				fleet.urls = append(fleet.urls, url)
			}
			accessLog := filepath.Join(home, "access.log")
			p := startProgram(t, "--config", fleet.configFile(t, "access_log: {file: "+accessLog+"}\n").path)

			if a.files != nil {
				for path, text := range a.files(p.url) {
					writeFileAt(t, filepath.Join(home, path), text)
				}
			}
			a.run(t, name, home, work, p.url)
			if got, err := os.ReadFile(file); string(got) != "hello world\n" {
				t.Errorf("the file has %q, %v", got, err)
			}
			checkAgentRequests(t, p, accessLog, a.endpoint, len(script))
		})
	}
}

// requireLoopbackOnly fails unless nothing but this machine's own processes can be reached.
func requireLoopbackOnly(t *testing.T) {
	t.Helper()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		if i.Flags&net.FlagLoopback == 0 {
			t.Fatalf("there is a network interface %s; lab/agents/run runs this test without one", i.Name)
		}
	}
}

// run runs the agent to its end.
func (a agent) run(t *testing.T, name, home, work, proxy string) {
	t.Helper()
	program, err := filepath.Abs(agentCommand(name))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), agentTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, a.command...)
	cmd.Dir = work
	cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH"), "TERM=dumb"}
	if a.env != nil {
		cmd.Env = append(cmd.Env, a.env(proxy)...)
	}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	began := time.Now()
	if err := cmd.Run(); err != nil || !strings.Contains(output.String(), "I fixed the typo.") {
		t.Fatalf("%s, %v, context %v:\n%s", name, err, ctx.Err(), output.String())
	}
	t.Logf("%s worked for %v", name, time.Since(began))
}

// checkAgentRequests checks the access log of a proxy whose only client was an agent.
func checkAgentRequests(t *testing.T, p *program, accessLog, endpoint string, turns int) {
	t.Helper()
	var requests []gjson.Result
	p.eventually(fmt.Sprint(turns, " requests are logged"), func() bool {
		requests = nil
		log, err := os.ReadFile(accessLog)
		for line := range bytes.Lines(log) {
			if r := gjson.ParseBytes(line); r.Get("endpoint").Str == endpoint {
				requests = append(requests, r)
			}
		}
		return err == nil && len(requests) >= turns
	})
	if len(requests) != turns {
		t.Fatalf("%d requests, want %d: %s", len(requests), turns, requests)
	}
	for turn, r := range requests {
		if r.Get("code").Int() != 200 || r.Get("backend").Str != requests[0].Get("backend").Str {
			t.Errorf("turn %d: %s", turn, r)
		}
		// A block of the proxy has 64 tokens, one of the replica 16.
		predicted, cached := r.Get("predicted_tokens").Int(), r.Get("cached_tokens").Int()
		if turn > 0 && (cached < 5000 || predicted < cached-64-16 || predicted > cached+64) {
			t.Errorf("turn %d: %d tokens were predicted to be cached, %d were", turn, predicted, cached)
		}
	}
}

// writeFileAt writes a file and makes its folders.
func writeFileAt(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
