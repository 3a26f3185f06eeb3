//go:build unix

package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/proxy/apikey"
)

func TestWatcherReportsEachChangeOnce(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	t.Parallel()
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

// A reload of which any part cannot be put into use changes nothing.
func TestFailedReloadChangesNothing(t *testing.T) {
	t.Parallel()
	failing := standIn{chat: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }}
	level := new(slog.LevelVar)
	f := startFronted(t, func(c *config.Config) {
		c.AdminToken, c.Breaker.Failures = "what-operators-send", 1
		c.AccessLog.File = filepath.Join(t.TempDir(), "access.log")
	}, failing.start(t))
	f.server.process.logLevel = level
	f.server.listeners.public.certificate.Store(new(tls.Certificate)) // for replacing it alone
	f.ready(1)
	f.chat(plainChat) // opens the breaker
	next := func() *config.Config {
		c := *f.server.config
		c.AdminToken, c.TLS.Certificate = "another-for-operators", &tls.Certificate{Leaf: &x509.Certificate{}}
		c.Keys = []config.Key{{Key: apikey.Key{Name: "a", Hashes: []apikey.Hash{{1}}}}}
		c.Routing.Policy, c.Routing.Queue.Requests, c.SLO.TTFT = "least-load", 7, time.Hour
		c.Breaker.Failures = 0 // closes those that are open
		c.Responses.MaxEntries = 7
		c.Health.Interval, c.Poll.Interval = time.Hour, time.Hour
		c.Limits.BodyBytes = 7
		c.Timeouts.Connect, c.Timeouts.Shutdown = time.Hour, time.Hour
		c.AccessLog.File = filepath.Join(t.TempDir(), "other.log")
		c.Log.Level = "error"
		c.Backends = append(slices.Clone(c.Backends), config.Backend{Name: "added", URL: unusedURL, Weight: 1})
		c.Backends[0].Weight = 7
		return &c
	}
	before := settingsInUse(f.server)
	for name, spoil := range map[string]func(*config.Config){
		"protection":        func(c *config.Config) { c.AdminToken = "" },
		"log level":         func(c *config.Config) { c.Log.Level = "loud" },
		"policy":            func(c *config.Config) { c.Routing.Policy = "fastest" },
		"backend's URL":     func(c *config.Config) { c.Backends[1].URL = "no URL" },
		"backend's CA":      func(c *config.Config) { c.Backends[0].CAFile, c.Backends[0].CA = "ca.pem", "no certificate" },
		"backends conflict": func(c *config.Config) { c.Backends[1].Name = c.Backends[0].Name },
		"access log":        func(c *config.Config) { c.AccessLog.File = filepath.Join(t.TempDir(), "missing", "access.log") },
	} {
		c := next()
		spoil(c)
		if f.server.applyReload(c, nil) {
			t.Fatalf("%s: applied", name)
		}
		after := settingsInUse(f.server)
		for part := range before {
			if after[part] != before[part] {
				t.Errorf("%s: %s was %s, is %s", name, part, before[part], after[part])
			}
		}
	}
	if !f.server.applyReload(next(), nil) {
		t.Fatalf("a valid one was not applied:\n%s", f.log.String())
	}
	after := settingsInUse(f.server)
	for part := range before {
		if after[part] == before[part] {
			t.Errorf("a valid one left %s at %s", part, before[part])
		}
	}
}

// settingsInUse returns each part of a running Server that a reload changes, as text. What is
// replaced as a whole is there by its address.
func settingsInUse(s *Server) map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	field := func(of any, path ...string) string {
		v := reflect.ValueOf(of)
		for _, name := range path {
			v = reflect.Indirect(v).FieldByName(name)
		}
		return fmt.Sprintf("%+v", v)
	}
	states := reflect.ValueOf(s.router).Elem().FieldByName("fleet").FieldByName("states")
	backend := s.registry.All()[0]
	var names []string
	for _, b := range s.registry.All() {
		names = append(names, b.Name)
	}
	return map[string]string{
		"config":            fmt.Sprintf("%p", s.config),
		"log level":         s.process.logLevel.Level().String(),
		"router settings":   field(s.router, "fleet", "settings"),
		"policy":            field(s.router, "fleet", "policy"),
		"queue":             field(s.router, "admission", "queue", "settings"),
		"breakers":          fmt.Sprintf("%+v", states.Index(0).FieldByName("health").Elem().FieldByName("breaker")),
		"proxy settings":    field(s.proxy, "settings"),
		"keys":              field(s.keys, "valid"),
		"access log":        field(s.accessLog, "output"),
		"stored responses":  field(s.responses, "settings"),
		"admin token":       field(s.admin, "token"),
		"certificate":       fmt.Sprintf("%p", s.listeners.public.certificate.Load()),
		"health checks":     field(s.checker, "settings", "value"),
		"polls":             field(s.poller, "settings", "value"),
		"backends":          fmt.Sprint(names),
		"backend options":   fmt.Sprintf("%p", backend.Options()),
		"backend transport": fmt.Sprintf("%p", backend.Options().Transport),
		"drain timeout":     field(s.fleet, "drainTimeout"),
	}
}
