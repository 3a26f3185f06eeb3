//go:build unix

package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

// What lets more people in than before may be a file cut short: nothing of that is
// taken while the proxy runs.
func TestReloadRefusesWeakerProtection(t *testing.T) {
	t.Parallel()
	const guards = "admin_token: what-operators-send\nkeys: [{name: a, sha256: \"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"}]\n"
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "tenant: isolate\n"+guards)
	p := startProgram(t, "--config", file.path)
	unknown := func() int {
		t.Helper()
		resp, err := p.get("/v1/models")
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode
	}
	file.write("")
	p.reloaded("failed", 1)
	for _, setting := range []string{"keys", "admin_token", "tenant"} {
		p.awaitLog(`msg="config reload failed, keeping previous config" err="` + setting + `: `)
	}
	if status := unknown(); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d", status)
	}
	file.write("tenant: isolate\nlimits: {in_flight: 9}\n" + guards)
	p.reloaded("ok", 1)
}

// Files that only a refused configuration names are watched as well.
func TestReloadWatchesFilesOfRejectedConfig(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	token := filepath.Join(t.TempDir(), "token")
	file.write("admin_token_file: " + token)
	p.awaitLog(`err="admin_token_file: .*no such file`)
	if err := os.WriteFile(token, []byte("what-operators-send"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.reloaded("ok", 1)
}
