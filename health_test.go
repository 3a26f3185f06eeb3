package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// health runs `warmroute health` and returns its status and what it printed.
func health(t *testing.T, args ...string) (int, string) {
	t.Helper()
	var output bytes.Buffer
	status := run(t.Context(), append([]string{"health"}, args...), &output, &output)
	return status, output.String()
}

func TestHealthAsksWhereTheSettingsSay(t *testing.T) {
	f := func(listen, want string) {
		t.Helper()
		if got := mustLoad(t, "", "--listen", listen, "http://a:8000").PublicURL() + "/livez"; got != want {
			t.Errorf("%s: %s, want %s", listen, got, want)
		}
	}
	f(":8080", "http://127.0.0.1:8080/livez")
	f("0.0.0.0:80", "http://127.0.0.1:80/livez")
	f("[::]:9000", "http://127.0.0.1:9000/livez")
	f("[::1]:9000", "http://[::1]:9000/livez")
	f("10.0.0.5:8080", "http://10.0.0.5:8080/livez")
	pair := newPEMPair(t)
	if got := mustLoad(t, pair.yaml()+"listen: :8443\nbackends: [\"http://a:8000\"]").PublicURL() + "/livez"; got != "https://127.0.0.1:8443/livez" {
		t.Errorf("with TLS: %s", got)
	}
}

func TestHealthFollowsTheServersSettings(t *testing.T) {
	pair := newPEMPair(t)
	for scheme, yaml := range map[string]string{"http": "", "https": pair.yaml()} {
		t.Run(scheme, func(t *testing.T) {
			p := startProgram(t, "--config", startSimFleet(t, 1, 200_000).configFile(t, yaml).path)
			_, address, _ := strings.Cut(p.url, "://")
			if status, output := health(t, "--listen", address); scheme == "http" && status != 0 {
				t.Errorf("by flag: status %d, %s", status, output)
			}
			// The file has other faults by now, which the running proxy does not mind.
			file := filepath.Join(t.TempDir(), "later.yaml")
			if err := os.WriteFile(file, []byte("listen: "+address+"\nrouting: {policy: fastest}\n"+yaml), 0o600); err != nil {
				t.Fatal(err)
			}
			if status, output := health(t, "--config", file); status != 0 {
				t.Errorf("by file: status %d, %s", status, output)
			}
			t.Setenv("WARMROUTE_CONFIG", file)
			if status, output := health(t); status != 0 {
				t.Errorf("by WARMROUTE_CONFIG: status %d, %s", status, output)
			}
		})
	}
}

func TestHealthFailsWithStatus1(t *testing.T) {
	t.Setenv("WARMROUTE_LISTEN", "127.0.0.1:1")
	if status, output := health(t); status != 1 || !strings.Contains(output, "127.0.0.1:1/livez") {
		t.Errorf("nobody listens: status %d, %s", status, output)
	}
	// Docker takes no other status for unhealthy.
	if status, output := health(t, "--config", "no-such.yaml"); status != 1 {
		t.Errorf("no such file: status %d, %s", status, output)
	}
}

func TestServeReadsTheFileThatTheEnvironmentNames(t *testing.T) {
	file := filepath.Join(t.TempDir(), "named.yaml")
	if err := os.WriteFile(file, []byte("backends: [\"http://a:8000\"]\nlisten: :1234"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WARMROUTE_CONFIG", file)
	if c := mustLoad(t, ""); c.Listen != ":1234" {
		t.Errorf("listen is %s", c.Listen)
	}
	if c := mustLoad(t, "backends: [\"http://a:8000\"]"); c.Listen != ":8080" {
		t.Errorf("--config does not go before it: listen is %s", c.Listen)
	}
}
