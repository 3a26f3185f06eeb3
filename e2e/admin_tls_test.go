package e2e

import (
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const adminTestToken = "a-token-that-operators-have"

func (p *pemPair) adminYAML() string {
	return fmt.Sprintf("admin_tls: {cert_file: %s, key_file: %s}\nadmin_token: %s\n", p.cert, p.key, adminTestToken)
}

// startWithAdminTLS starts a proxy whose admin listener speaks TLS.
func startWithAdminTLS(t *testing.T, pair *pemPair, file *configFile) *program {
	t.Helper()
	p := launch(t, exec.Command(binary, "serve", "--config", file.path))
	p.url = "http://" + p.awaitLog(`msg=listening public=(\S+)`)
	p.admin = "https://" + p.awaitLog(`msg=listening admin=(\S+) tls=true`)
	client := &http.Client{}
	p.eventually("ready", func() bool { return statusOf(client, p.url+"/readyz", "") == http.StatusOK })
	client.CloseIdleConnections()
	return p
}

// statusOf asks for a URL, with a bearer token unless it is empty, and returns the
// status, or 0 where nothing answers.
func statusOf(client *http.Client, url, token string) int {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

func TestAdminListenerOverTLS(t *testing.T) {
	t.Parallel()
	pair := newPEMPair(t)
	file := startSimFleet(t, 1, 200_000).configFile(t, pair.adminYAML())
	p := startWithAdminTLS(t, pair, file)
	client := &http.Client{Transport: pair.transport(false)}
	defer client.CloseIdleConnections()
	for path, want := range map[string][2]int{"/metrics": {200, 200}, "/": {200, 200}, "/api/state": {401, 200}} {
		for i, token := range []string{"", adminTestToken} {
			if got := statusOf(client, p.admin+path, token); got != want[i] {
				t.Errorf("GET %s with the token %q is answered with %d, want %d", path, token, got, want[i])
			}
		}
	}
	if got := statusOf(http.DefaultClient, strings.Replace(p.admin, "https", "http", 1)+"/metrics", ""); got != http.StatusBadRequest {
		t.Errorf("plain HTTP is answered with %d", got)
	}
	if got := statusOf(http.DefaultClient, p.admin+"/metrics", ""); got != 0 {
		t.Errorf("who does not trust the certificate gets %d", got)
	}
	_, err := tls.Dial("tcp", strings.TrimPrefix(p.admin, "https://"), &tls.Config{RootCAs: pair.trust, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10})
	if err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("TLS 1.1: %v", err)
	}
	if got := statusOf(http.DefaultClient, p.url+"/livez", ""); got != http.StatusOK {
		t.Errorf("the public listener without TLS: %d", got)
	}

	pair.write(2, time.Now().Add(time.Hour))
	p.eventually("the new certificate is used", func() bool { return pair.served(p.admin) == 2 })
	file.write("admin_token: " + adminTestToken)
	p.awaitLog(`setting change requires a restart" setting=admin_tls.cert_file`)
	if got := statusOf(client, p.admin+"/api/state", adminTestToken); got != http.StatusOK {
		t.Errorf("after a reload without admin_tls: %d", got)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestExplainOverTLS(t *testing.T) {
	t.Parallel()
	pair, other := newPEMPair(t), newPEMPair(t)
	fleet := startSimFleet(t, 1, 200_000)
	p := startWithAdminTLS(t, pair, fleet.configFile(t, pair.adminYAML()))
	request := writeFile(t, `{"model":"sim","messages":[{"role":"user","content":"hello"}]}`)
	tokenFile := writeFile(t, adminTestToken)
	authority := func(p *pemPair) string {
		file := filepath.Join(t.TempDir(), "authority.pem")
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.authoritySigned})
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	settings := func(pair *pemPair) string {
		file := writeFile(t, "admin: "+strings.TrimPrefix(p.admin, "https://")+"\n"+pair.adminYAML()+"backends: [http://a:8000]")
		return file
	}
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"the settings' certificate":   {[]string{"--config", settings(pair)}, 0, "> "},
		"another one in the settings": {[]string{"--config", settings(other)}, 1, "with --ca-file"},
		"the authority":               {[]string{"--admin", p.admin, "--token-file", tokenFile, "--ca-file", authority(pair)}, 0, "> "},
		"another authority":           {[]string{"--admin", p.admin, "--token-file", tokenFile, "--ca-file", authority(other)}, 1, "with --ca-file"},
		"no authority":                {[]string{"--admin", p.admin, "--token-file", tokenFile}, 1, "with --ca-file"},
		"no file":                     {[]string{"--admin", p.admin, "--ca-file", tokenFile + ".no"}, 2, "--ca-file"},
		"no certificate":              {[]string{"--admin", p.admin, "--ca-file", tokenFile}, 1, "has no certificate"},
		"plain HTTP":                  {[]string{"--admin", strings.TrimPrefix(p.admin, "https://"), "--token-file", tokenFile}, 1, "requires https"},
	} {
		status, out, complaint := runCommand(t, append([]string{"explain", "-f", request}, c.args...)...)
		if status != c.status || !strings.Contains(out+complaint, c.want) {
			t.Errorf("%s: status %d, %s%s; want %d, %q", name, status, out, complaint, c.status, c.want)
		}
	}
}
