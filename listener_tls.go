package main

import (
	"crypto/tls"
	"fmt"
	"time"
)

// enabled reports whether OpenAI clients connect over TLS.
func (c ListenerTLSConfig) enabled() bool { return c.pair != nil }

// read reads the certificate and its key.
func (c *ListenerTLSConfig) read(f *faults) {
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
	chain, err := readFile(c.CertFile)
	if err != nil {
		f.add("tls.cert_file", "%v", err)
	}
	key, err := readFile(c.KeyFile)
	if err != nil {
		f.add("tls.key_file", "%v", err)
	}
	if f.blames("tls.cert_file", "tls.key_file") {
		return
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		f.add("tls.key_file", "%s with the certificate in %s: %v", c.KeyFile, c.CertFile, err)
		return
	}
	c.pair = &pair
}

// warnings tells of a certificate that clients will refuse.
func (c ListenerTLSConfig) warnings() []string {
	if c.pair == nil || time.Now().Before(c.pair.Leaf.NotAfter) {
		return nil
	}
	return []string{fmt.Sprintf("tls.cert_file: %s expired on %s; clients will refuse it", c.CertFile, c.pair.Leaf.NotAfter.Format(time.DateOnly))}
}

// tlsConfig is the public listener's, with the certificate in use at the time of
// each handshake. HTTP/2 is offered beside HTTP/1.1.
func (s *service) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.certificate.Load(), nil },
	}
}
