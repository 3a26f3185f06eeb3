package main

import (
	"crypto/tls"
	"fmt"
	"time"
)

// maxPEMBytes is far above any certificate with its chain.
const maxPEMBytes = 1 << 20

// enabled reports whether OpenAI clients connect over TLS.
func (c ListenerTLSConfig) enabled() bool { return c.CertFile != "" }

// files are what has to be read again when it changes.
func (c ListenerTLSConfig) files() []string {
	if !c.enabled() {
		return nil
	}
	return []string{c.CertFile, c.KeyFile}
}

// load reads the certificate. blame is the setting that an error is about.
func (c ListenerTLSConfig) load() (certificate *tls.Certificate, blame string, err error) {
	chain, err := readBounded(c.CertFile, maxPEMBytes)
	if err != nil {
		return nil, "tls.cert_file", err
	}
	key, err := readBounded(c.KeyFile, maxPEMBytes)
	if err != nil {
		return nil, "tls.key_file", err
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		return nil, "tls.key_file", fmt.Errorf("%s with the certificate in %s: %w", c.KeyFile, c.CertFile, err)
	}
	return &pair, "", nil
}

// check reports files that make no certificate.
func (c ListenerTLSConfig) check(f *faults) {
	switch {
	case c.CertFile == "" && c.KeyFile == "":
		return
	case c.CertFile == "":
		f.add("tls.cert_file", "is missing, and tls.key_file is of no use without; give both or neither")
		return
	case c.KeyFile == "":
		f.add("tls.key_file", "is missing, and tls.cert_file is of no use without; give both or neither")
		return
	}
	if _, blame, err := c.load(); err != nil {
		f.add(blame, "%v", err)
	}
}

// warnings tells of a certificate that clients will refuse.
func (c ListenerTLSConfig) warnings() []string {
	if !c.enabled() {
		return nil
	}
	pair, _, err := c.load()
	if err != nil || time.Now().Before(pair.Leaf.NotAfter) {
		return nil
	}
	return []string{fmt.Sprintf("tls.cert_file: %s expired on %s; clients will refuse it", c.CertFile, pair.Leaf.NotAfter.Format(time.DateOnly))}
}

// tlsConfig is the public listener's, with the certificate in use at the time of
// each handshake. HTTP/2 is offered beside HTTP/1.1.
func (s *service) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.certificate.Load(), nil },
	}
}
