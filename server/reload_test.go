//go:build unix

package server

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"warmroute/config"
)

func TestWatcherReportsEachChangeOnce(t *testing.T) {
	dir := t.TempDir()
	file, token, ca := filepath.Join(dir, "warmroute.yaml"), filepath.Join(dir, "token"), filepath.Join(dir, "ca.pem")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	writeCertificate(t, ca)
	write(token, "what-operators-send")
	backend := "backends: [{url: https://a:8000, ca_file: " + ca + "}]\n"
	write(file, backend)
	w := newConfigWatcher(file, func() (*config.Config, error) { return loadConfigFile(t, file) })
	changed := func(want bool) {
		t.Helper()
		w.checkSettledChange()
		if got := w.checkSettledChange(); got != want {
			t.Errorf("changed: %v", got)
		}
	}
	reload := func() {
		t.Helper()
		if _, err := w.loadIfRegular(); err != nil {
			t.Fatal(err)
		}
	}
	reload()
	changed(false)
	write(file, backend+"admin_token_file: "+token)
	changed(true)
	reload()
	changed(false)
	write(token, "what-others-send")
	changed(true)
	reload()
	changed(false)
	writeCertificate(t, ca)
	changed(true)
}

// A file may change after it was read and before the next check.
func TestWatcherSeesChangeDuringLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "warmroute.yaml")
	if err := os.WriteFile(file, []byte("limits: {in_flight: 8}"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := newConfigWatcher(file, func() (*config.Config, error) {
		c, err := loadConfigFile(t, file, "http://a:8000")
		if err := os.WriteFile(file, []byte("limits: {in_flight: 9}"), 0o600); err != nil {
			t.Error(err)
		}
		return c, err
	})
	if _, err := w.loadAndTrackFiles(); err != nil {
		t.Fatal(err)
	}
	w.checkSettledChange()
	if !w.checkSettledChange() {
		t.Error("not seen")
	}
}

// A network disk that is gone holds up whoever reads from it.
func TestBlockedLoadDoesNotDelayShutdown(t *testing.T) {
	asked, reading, never := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	defer close(never)
	s, _ := newSuccessor(t, process{reloads: asked, watcher: newConfigWatcher("", func() (*config.Config, error) {
		close(reading)
		<-never
		return nil, os.ErrClosed
	})})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	asked <- syscall.SIGHUP
	<-reading
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestFailedApplyChangesNothing(t *testing.T) {
	s, _ := newSuccessor(t, process{})
	s.listeners.closeAndWait()
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
		if s.config != before || s.fleet.managed[0].settings != transportSettingsOf(before) {
			t.Error("something of it is in use")
		}
	}
}
