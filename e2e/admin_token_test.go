package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAdminTokenCreated has the first start create the file of admin_token_file, and the next one use it.
func TestAdminTokenCreated(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	file := startSimFleet(t, 1, 200_000).configFile(t, "admin_token_file: "+token+"\n")
	if status, _, output := runCommand(t, "check", "--config", file.path); status != 0 {
		t.Errorf("check refuses what serve would create: %s", output)
	}
	var first string
	for range 2 {
		p := startProgram(t, "--config", file.path)
		info, err := os.Stat(token)
		if err != nil || info.Mode() != 0o600 {
			t.Fatalf("file %v, %v", info, err)
		}
		data, err := os.ReadFile(token)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.TrimSpace(string(data))
		if first == "" {
			first = got
			p.awaitLog(`msg="admin token created; the live page asks for it" file=` + token + ` page=http://127.0.0.1:`)
		} else if strings.Contains(p.log.String(), "admin token created") {
			t.Error("the second start creates a token as well")
		}
		if got != first || len(got) < 26 || strings.Contains(p.log.String(), got) {
			t.Errorf("token %q after %q; the log:\n%s", got, first, p.log.String())
		}
		for sent, want := range map[string]int{"": http.StatusUnauthorized, got: http.StatusOK} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.admin+"/api/state", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+sent)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("status %d for the token %q, want %d", resp.StatusCode, sent, want)
			}
		}
		p.signal(os.Interrupt)
		p.exit()
	}
	absent := writeFile(t, "admin_token_file: "+token+"/none/token\n")
	if status, _, output := runCommand(t, "serve", "--config", absent, "http://127.0.0.1:1"); status != 2 ||
		!strings.Contains(output, "admin_token_file: ") {
		t.Errorf("without a folder: status %d, %s", status, output)
	}
}
