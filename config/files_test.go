package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// writeCertificate writes a self-signed certificate that is valid until then, and its
// key, and returns the paths of the files.
func writeCertificate(t *testing.T, until time.Time) (certFile, keyFile string) {
	t.Helper()
	return writeCertificateLike(t, x509.Certificate{NotAfter: until})
}

// writeCertificateLike is writeCertificate for a certificate with other fields as well.
func writeCertificateLike(t *testing.T, template x509.Certificate) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, template.NotBefore = big.NewInt(1), template.NotAfter.Add(-2*time.Hour)
	cert, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert},
		keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func TestListenerCertificates(t *testing.T) {
	cert, key := writeCertificate(t, time.Now().Add(time.Hour))
	_, otherKey := writeCertificate(t, time.Now().Add(time.Hour))
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, section := range []string{"tls", "admin_tls"} {
		for _, c := range []struct{ cert, key, want string }{
			{cert, key, "<nil>"},
			{cert, "", section + ".key_file: is missing"},
			{"", key, section + ".cert_file: is missing"},
			{cert + ".no", key, section + ".cert_file: stat "},
			{cert, key + ".no", section + ".key_file: stat "},
			{cert, otherKey, section + ".key_file: " + otherKey + " with the certificate in " + cert + ": tls: private key does not match"},
			{empty, key, "failed to find any PEM data"},
		} {
			_, err := load(t, fmt.Sprintf("%s: {cert_file: %q, key_file: %q}", section, c.cert, c.key), "http://a:8000")
			if got := fmt.Sprint(err); !strings.Contains(got, c.want) {
				t.Errorf("%s: %q and %q: got %s, want %s", section, c.cert, c.key, got, c.want)
			}
		}
	}
}

func TestListenerWarnings(t *testing.T) {
	cert, key := writeCertificate(t, time.Now().Add(time.Hour))
	expired, expiredKey := writeCertificate(t, time.Now().Add(-time.Minute))
	const public, token = "admin: \":9090\"\n", "admin_token: " + plainKey + "\n"
	for _, c := range []struct{ yaml, want string }{
		{token, ""},
		{"registration: {listener: public, allow_from: [10.0.0.0/8], allow_urls: [\"http://10.*:8000\"]}\n",
			"registration.listener: public without state_file or redis.url"},
		{"registration: {listener: public, allow_from: [10.0.0.0/8], allow_urls: [\"http://10.*:8000\"]}\nstate_file: state\n", ""},
		{"registration: {listener: public, allow_from: [10.0.0.0/8], allow_urls: [\"http://10.*:8000\"]}\nredis: {url: \"redis://r\"}\n", ""},
		{public, "until admin_token is set"},
		{"kv_events: {listen: \"tcp://*:5557\"}\n", "kv_events.listen: tcp://*:5557 is reachable from other networks"},
		{"kv_events: {listen: \"tcp://203.0.113.5:5557\"}\n", "kv_events.listen: tcp://203.0.113.5:5557 is reachable from other networks"},
		{"kv_events: {listen: \"tcp://10.0.0.5:5557\"}\n", ""},
		{"kv_events: {listen: \"tcp://[::1]:5557\"}\n", ""},
		{public + token, "set admin_tls.cert_file and admin_tls.key_file"},
		{public + token + fmt.Sprintf("admin_tls: {cert_file: %s, key_file: %s}", cert, key), ""},
		{fmt.Sprintf("admin_tls: {cert_file: %s, key_file: %s}", expired, expiredKey), "admin_tls.cert_file: " + expired + " expired on "},
		{fmt.Sprintf("tls: {cert_file: %s, key_file: %s}", expired, expiredKey), "tls.cert_file: " + expired + " expired on "},
	} {
		got := strings.Join(mustLoad(t, c.yaml, "http://a:8000").Warnings(testLoader.Policies), "\n")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.yaml, got, c.want)
		}
	}
}

func TestCAWarnings(t *testing.T) {
	now := time.Now()
	named := func(name string) pkix.Name { return pkix.Name{CommonName: name} }
	for _, c := range []struct {
		name        string
		certificate x509.Certificate
		serverName  string
		want        string // in the warning; "": none
	}{
		{"authority", x509.Certificate{Subject: named("Private CA"), IsCA: true, BasicConstraintsValid: true}, "", ""},
		{"self-signed, with the name", x509.Certificate{Subject: named("vllm"), DNSNames: []string{"vllm"}}, "", ""},
		{"self-signed, with a name for server_name", x509.Certificate{Subject: named("gpu"), DNSNames: []string{"gpu"}}, "gpu", ""},
		{"self-signed, with another name", x509.Certificate{Subject: named("gpu"), DNSNames: []string{"gpu"}}, "",
			`"gpu" does not have vllm among its subject alternative names`},
		{"self-signed, without alternative names", x509.Certificate{Subject: named("vllm")}, "",
			`"vllm" does not have vllm among its subject alternative names`},
		{"self-signed by openssl, without alternative names", x509.Certificate{Subject: named("vllm"), IsCA: true, BasicConstraintsValid: true},
			"", `does not have vllm among`},
		{"expired", x509.Certificate{Subject: named("Private CA"), IsCA: true, BasicConstraintsValid: true, NotAfter: now.Add(-time.Minute)}, "",
			`"Private CA" expired on`},
	} {
		if c.certificate.NotAfter.IsZero() {
			c.certificate.NotAfter = now.Add(time.Hour)
		}
		path, _ := writeCertificateLike(t, c.certificate)
		yaml := fmt.Sprintf("backends: [{url: \"https://vllm:8000\", ca_file: %s, server_name: %q}]", path, c.serverName)
		got := strings.Join(mustLoad(t, yaml).Warnings(testLoader.Policies), "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) || got != "" && !strings.HasPrefix(got, "backends[0].ca_file: "+path) {
			t.Errorf("%s: got %q, want a warning with %q", c.name, got, c.want)
		}
	}
}
