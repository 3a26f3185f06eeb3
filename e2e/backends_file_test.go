//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestBackendsFileUnderLoad rewrites backends_file ten times, once with an error, while clients send requests.
func TestBackendsFileUnderLoad(t *testing.T) {
	t.Parallel()
	const replicas = 4
	fleet := startSimFleet(t, replicas, 200_000)
	file := filepath.Join(t.TempDir(), "backends")
	write := func(content string) {
		// As Kubernetes replaces a mounted ConfigMap: the file changes at once.
		if err := os.WriteFile(file+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write(fleet.urls[0] + "\n" + fleet.urls[1] + "\n")
	p := startProgram(t, "--config", writeFile(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbackends_file: "+file+"\n"))
	clients := p.startCrowd(8, &http.Transport{})
	applied := 0
	for i := range 10 {
		clients.more(50)
		if i == 5 {
			write("backends: [\n")
			p.reloaded("failed", 1)
			p.awaitLog(`msg="config reload failed, keeping previous config" err="` + file)
			continue
		}
		first := i % replicas
		write(fmt.Sprintf("# round %d\n%s\n%s\n", i, fleet.urls[first], fleet.urls[(first+1)%replicas]))
		applied++
		p.reloaded("ok", applied)
	}
	clients.more(50)
	clients.leave()
	p.eventually("two backends are left", func() bool {
		out, err := exec.Command(binary, "backends", "list", "--admin", p.admin).CombinedOutput()
		return err == nil && strings.Count(string(out), " file ") == 2
	})
}
