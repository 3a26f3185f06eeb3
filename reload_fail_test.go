//go:build unix

package main

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"warmroute/config"
)

// What lets more people in than before may be a file cut short: nothing of that is
// taken while the proxy runs.
func TestAReloadOpensNoDoor(t *testing.T) {
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
		p.awaitLog(`msg="configuration not reloaded, the old one stays" fault="` + setting + `: `)
	}
	if status := unknown(); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d", status)
	}
	file.write("tenant: isolate\nlimits: {in_flight: 9}\n" + guards)
	p.reloaded("ok", 1)
}

// Files that only a refused configuration names are watched as well.
func TestAFileThatARefusedConfigurationNamesIsSeen(t *testing.T) {
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	token := filepath.Join(t.TempDir(), "token")
	file.write("admin_token_file: " + token)
	p.awaitLog(`fault="admin_token_file: .*no such file`)
	if err := os.WriteFile(token, []byte("what-operators-send"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.reloaded("ok", 1)
}

func TestOneChangeIsOneReload(t *testing.T) {
	pair := newPEMPair(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("what-operators-send"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := startSimFleet(t, 1, 200_000).configFile(t, pair.yaml())
	load := func() (*config.Config, error) { return loadFile(t, file.path) }
	r := newReloader(file.path, load)
	look := func(want bool) {
		t.Helper()
		r.files.changed()
		if got := r.files.changed(); got != want {
			t.Errorf("changed: %v", got)
		}
	}
	read := func() {
		t.Helper()
		if _, err := r.again(); err != nil {
			t.Fatal(err)
		}
	}
	read()
	look(false)
	file.write(pair.yaml() + "admin_token_file: " + token)
	look(true)
	read()
	look(false)
	if err := os.WriteFile(token, []byte("what-others-send"), 0o600); err != nil {
		t.Fatal(err)
	}
	look(true)
	read()
	look(false)
	pair.write(2, time.Now().Add(time.Hour))
	look(true)
}

// A file may change between the moment in which it is read and the next look.
func TestAChangeWhileTheConfigurationIsReadIsSeen(t *testing.T) {
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	r := newReloader(file.path, func() (*config.Config, error) {
		c, err := loadFile(t, file.path)
		file.write("limits: {in_flight: 9}")
		return c, err
	})
	if _, err := r.read(); err != nil {
		t.Fatal(err)
	}
	r.files.changed()
	if !r.files.changed() {
		t.Error("not seen")
	}
}

// A network disk that is gone holds up whoever reads from it.
func TestAConfigurationThatCannotBeReadDoesNotHoldUpTheEnd(t *testing.T) {
	s, public, _ := successorOf(t)
	s.control.before.ready.Close()
	s.control.before.ready = nil
	asked, reading, never := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	defer close(never)
	s.control.reloads = asked
	s.control.reload = newReloader("", func() (*config.Config, error) {
		close(reading)
		<-never
		return nil, os.ErrClosed
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx, public, nil) }()
	asked <- syscall.SIGHUP
	<-reading
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAnErrorLeavesAllAsItWas(t *testing.T) {
	s, public, _ := successorOf(t)
	public.Close()
	before := s.config
	for _, change := range []func(*config.Config){
		func(c *config.Config) { c.Routing.Policy = "fastest" },
		func(c *config.Config) { c.Backends = []config.Backend{{Name: "other", URL: "no URL"}} },
	} {
		c := *before
		c.Timeouts.Connect = time.Hour
		change(&c)
		if err := s.apply(&c); err == nil {
			t.Fatal("applied")
		}
		if s.config != before || s.fleet.members[0].options != transportOptionsOf(before) {
			t.Error("something of it is in use")
		}
	}
}

func TestOnlyPlainFilesAreRead(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, setting := range []string{
		"keys_file: " + pipe, "admin_token_file: " + pipe, "tls: {cert_file: " + pipe + ", key_file: " + pipe + "}",
		"backends: [{url: https://a:8000, ca_file: " + pipe + "}]",
	} {
		yaml := setting
		if !strings.Contains(yaml, "backends") {
			yaml += "\nbackends: [http://a:8000]"
		}
		if _, err := load(t, yaml); err == nil || !strings.Contains(err.Error(), pipe+" is not a regular file") {
			t.Errorf("%s: %v", setting, err)
		}
	}
}
