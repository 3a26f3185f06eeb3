//go:build vllm

package e2e

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestSDKInFrontOfVLLM plays what the simulated replicas had to answer to three
// real ones, which scripts/sdk/run starts and REPLICA_URLS names. It kills
// the last of them and starts it again.
func TestSDKInFrontOfVLLM(t *testing.T) {
	urls := os.Getenv("REPLICA_URLS")
	if urls == "" {
		t.Fatal("REPLICA_URLS must list three replicas; scripts/sdk/run go starts them and runs this test")
	}
	f := &sdkFleet{model: "tiny", replicas: strings.Split(urls, ",")}
	victim := port(t, f.replicas[len(f.replicas)-1])
	f.kill = func() { vllmCPU(t, "down.sh", "--kill", victim) }
	f.restart = func() {
		n, err := strconv.Atoi(victim)
		if err != nil {
			t.Fatal(err)
		}
		vllmCPU(t, "up.sh", victim, strconv.Itoa(n+1000))
	}
	f.startProxy(t)
	f.test(t)
}

// vllmCPU runs one of the scripts that own the replicas.
func vllmCPU(t *testing.T, script string, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "scripts/vllm-cpu/"+script, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestTokenTurnsInFrontOfVLLM is TestTokenTurns with real replicas.
func TestTokenTurnsInFrontOfVLLM(t *testing.T) {
	urls := os.Getenv("REPLICA_URLS")
	if urls == "" {
		t.Fatal("REPLICA_URLS must list vLLM replicas with --enable-scale-out; scripts/sdk/run go starts them and runs this test")
	}
	file := (&simFleet{urls: strings.Split(urls, ",")}).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	p.eventually("all are ready", func() bool {
		return metricSum(t, p.admin, "warmroute_backend_ready") == float64(len(strings.Split(urls, ",")))
	})
	testTokenTurns(t, p.url, "tiny", 10)
}
