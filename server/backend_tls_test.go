package server

import (
	"encoding/pem"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"warmroute/config"
)

// startTLS serves the replica over https, and writes the certificate that it made
// for itself to a file. The certificate is for 127.0.0.1 and example.com.
func (s standIn) startTLS(t *testing.T) (url, caFile string) {
	t.Helper()
	server := httptest.NewUnstartedServer(s.handler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	caFile = filepath.Join(t.TempDir(), "ca.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}
	if err := os.WriteFile(caFile, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	return server.URL, caFile
}

// trust gives the backend a file of authorities, as loading does.
func trust(t *testing.T, b *config.Backend, caFile string) {
	t.Helper()
	pem, err := os.ReadFile(caFile)
	if err != nil {
		t.Fatal(err)
	}
	b.CAFile, b.CA = caFile, string(pem)
}

// Requests, readiness checks and polls all go by the backend's own authority.
func TestBackendCAFile(t *testing.T) {
	url, caFile := standIn{}.startTLS(t)
	other, otherFile := standIn{}.startTLS(t)
	named := strings.Replace(other, "127.0.0.1", "localhost", 1)
	f := startFronted(t, func(c *config.Config) {
		trust(t, &c.Backends[0], caFile)
		trust(t, &c.Backends[1], otherFile)
		c.Backends[1].ServerName = "example.com"
	}, url, named)
	f.ready(2)
	for _, b := range f.server.fleet.registry.All() {
		f.until("polled", func() bool { return b.Load() != nil })
	}
	for range 4 {
		f.answered()
	}
}

func TestBackendWithUntrustedCertificate(t *testing.T) {
	url, caFile := standIn{}.startTLS(t)
	for name, f := range map[string]struct {
		url    string
		change func(*config.Backend)
		why    string
	}{
		"no authority given": {url, func(*config.Backend) {}, "certificate signed by unknown authority"},
		"not its name": {strings.Replace(url, "127.0.0.1", "localhost", 1), func(b *config.Backend) { trust(t, b, caFile) },
			"certificate is valid for"},
		"nor the one given": {url, func(b *config.Backend) { trust(t, b, caFile); b.ServerName = "other.org" }, "certificate is valid for"},
	} {
		t.Run(name, func(t *testing.T) {
			p := startFronted(t, func(c *config.Config) { f.change(&c.Backends[0]) }, f.url)
			p.logs(f.why)
			p.ready(0)
		})
	}
}
