package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"warmroute/proxy"
	"warmroute/router"
)

// writeFile returns the path of a new file.
func writeFile(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestExplainRunningProxy(t *testing.T) {
	const adminToken = "the-token-of-operators-0123456789"
	config := startSimFleet(t, 2, 200_000).configFile(t, "admin_token: "+adminToken+"\n")
	p := startProgram(t, "--config", config.path)
	body := `{"model":"sim","messages":[{"role":"user","content":"` + strings.Repeat("some words ", 200) + `"}],"max_tokens":3}`
	file, token := writeFile(t, body), writeFile(t, adminToken+"\n")
	if status, out, stderr := runCommand(t, "explain", "--admin", p.admin, "--token-file", token, "-f", file); status != 0 ||
		!strings.Contains(out, "No candidate holds any of its ") {
		t.Fatalf("of a cold fleet: status %d, %s%s", status, out, stderr)
	}
	resp, err := http.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	holder := resp.Header.Get("X-Warmroute-Backend")
	t.Setenv("WARMROUTE_ADMIN", strings.TrimPrefix(p.admin, "http://"))
	t.Setenv("WARMROUTE_ADMIN_TOKEN", adminToken+"-of-old")
	for _, command := range [][]string{{"explain", "-f", file}, {"replay", "--from", p.admin}} {
		status, _, stderr := runCommand(t, command...)
		if status != 1 || !strings.Contains(stderr, "invalid admin token") || !strings.Contains(stderr, "that of WARMROUTE_ADMIN_TOKEN") {
			t.Errorf("%q with a wrong token: status %d, %s", command, status, stderr)
		}
	}
	t.Setenv("WARMROUTE_ADMIN_TOKEN", adminToken)
	status, out, stderr := runCommand(t, "explain", "-f", file, "--json")
	var e proxy.Explanation
	if err := json.Unmarshal([]byte(out), &e); status != 0 || err != nil || e.Choice != holder || e.Reason != router.ReasonPrefix {
		t.Errorf("status %d, %v, %s%s", status, err, out, stderr)
	}
	if status, out, stderr := runCommand(t, "requests", "--backend", holder, "--status", "200"); status != 0 ||
		!strings.Contains(out, resp.Header.Get("X-Request-Id")) || !strings.Contains(out, "1 of 1 found") {
		t.Errorf("finished requests: status %d, %s%s", status, out, stderr)
	}
	cmd := exec.Command(binary, "explain", "-f", "-", "--tried", holder, "-H", "X-Warmroute-Priority: 4")
	cmd.Stdin = strings.NewReader(body)
	if printed, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(printed), "tried already") {
		t.Errorf("from the standard input: %v, %s", err, printed)
	}
}

func TestHealthOfRunningProxy(t *testing.T) {
	pair := newPEMPair(t)
	for scheme, yaml := range map[string]string{"http": "", "https": pair.yaml()} {
		t.Run(scheme, func(t *testing.T) {
			p := startProgram(t, "--config", startSimFleet(t, 1, 200_000).configFile(t, yaml).path)
			_, address, _ := strings.Cut(p.url, "://")
			if status, _, output := runCommand(t, "health", "--listen", address); scheme == "http" && status != 0 {
				t.Errorf("by flag: status %d, %s", status, output)
			}
			// The file has got an error since, which does not matter to the running proxy.
			file := filepath.Join(t.TempDir(), "later.yaml")
			if err := os.WriteFile(file, []byte("listen: "+address+"\nrouting: {policy: fastest}\n"+yaml), 0o600); err != nil {
				t.Fatal(err)
			}
			if status, _, output := runCommand(t, "health", "--config", file); status != 0 {
				t.Errorf("by file: status %d, %s", status, output)
			}
			t.Setenv("WARMROUTE_CONFIG", file)
			if status, _, output := runCommand(t, "health"); status != 0 {
				t.Errorf("by WARMROUTE_CONFIG: status %d, %s", status, output)
			}
		})
	}
}

func TestExitStatusAfterInterrupt(t *testing.T) {
	f := func(readyOutput string, args ...string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		output := &syncBuffer{}
		cmd.Stdout, cmd.Stderr = output, output
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); !strings.Contains(output.String(), readyOutput); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				cmd.Process.Kill()
				t.Fatalf("%q not within a minute in %s", readyOutput, output.String())
			}
		}
		cmd.Process.Signal(os.Interrupt)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("%q: status %d; %s", args, code, output.String())
		}
	}
	f("base URL", "sim", "--listen", "127.0.0.1:0")
	f("listening", "serve", "--listen", "127.0.0.1:0", "--admin", "", "http://127.0.0.1:1")
	f("Live page", "demo", "--backends", "1")
}

func TestControlRunningProxy(t *testing.T) {
	fleet := startSimFleet(t, 2, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "").path)
	t.Setenv("WARMROUTE_ADMIN", strings.TrimPrefix(p.admin, "http://"))
	ready := func(n float64) {
		t.Helper()
		p.eventually("as many are ready", func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == n })
	}
	ready(2)
	name := strings.TrimPrefix(fleet.urls[0], "http://")
	for _, c := range []struct {
		args  string
		exit  int
		says  string
		ready float64
	}{
		{"sleep " + name, 0, name, 1},
		{"resume " + name, 1, "the engine is asleep", 1},
		{"wake --all", 0, name, 2},
		{"pause --all --mode keep", 0, name, 0},
		{"resume --all", 0, name, 2},
		{"reset-cache --all", 0, name, 2},
		{"load-adapter --all --adapter sql --path /adapters/sql", 0, name, 2},
		{"unload-adapter " + name + " --adapter none", 1, "cannot be found", 2},
		{"unload-adapter --all --adapter sql", 0, name, 2},
		{"sleep nowhere", 1, "unknown backend", 2},
	} {
		if exit, stdout, stderr := runCommand(t, append([]string{"backends"}, strings.Fields(c.args)...)...); exit != c.exit ||
			!strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit status %d, %s%s", c.args, exit, stdout, stderr)
		}
		ready(c.ready)
	}
}

func TestDrainExitStatus(t *testing.T) {
	fleet := startSimFleet(t, 1, 200_000)
	p := startProgram(t, "--config", fleet.configFile(t, "").path)
	name := strings.TrimPrefix(fleet.urls[0], "http://")
	drain := func(wait string) (exit int, output string) {
		exit, stdout, stderr := runCommand(t, "backends", "drain", name, "--admin", p.admin, "--wait", wait)
		return exit, stdout + stderr
	}
	ctx, leave := context.WithCancel(t.Context())
	body := `{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":3000,"messages":[{"role":"user","content":"long"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if exit, output := drain("100ms"); exit != 1 || !strings.Contains(output, "draining, 1 request in flight after 100ms") {
		t.Errorf("with a request in flight: exit status %d, %s", exit, output)
	}
	leave()
	if exit, output := drain("1m"); exit != 0 || !strings.Contains(output, "draining, 0 requests in flight") {
		t.Errorf("without: exit status %d, %s", exit, output)
	}
}
