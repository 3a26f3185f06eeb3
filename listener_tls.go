package main

import (
	"crypto/tls"
	"fmt"
	"sync/atomic"
	"time"
)

// enabled reports whether the listener speaks TLS.
func (c ListenerTLSConfig) enabled() bool { return c.pair != nil }

// readCertificate reads the certificate and its key. section is "tls" or "admin_tls".
func (c *ListenerTLSConfig) readCertificate(f *faults, section string) {
	certFile, keyFile := section+".cert_file", section+".key_file"
	switch {
	case c.CertFile == "" && c.KeyFile == "":
		return
	case c.CertFile == "":
		f.add(certFile, "is missing, and %s is of no use without; give both or neither", keyFile)
		return
	case c.KeyFile == "":
		f.add(keyFile, "is missing, and %s is of no use without; give both or neither", certFile)
		return
	}
	chain, err := readFile(c.CertFile)
	if err != nil {
		f.add(certFile, "%v", err)
	}
	key, err := readFile(c.KeyFile)
	if err != nil {
		f.add(keyFile, "%v", err)
	}
	if f.blames(certFile, keyFile) {
		return
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		f.add(keyFile, "%s with the certificate in %s: %v", c.KeyFile, c.CertFile, err)
		return
	}
	c.pair = &pair
}

// warnings tells of a certificate that clients will refuse. section is as for read.
func (c ListenerTLSConfig) warnings(section string) []string {
	if c.pair == nil || time.Now().Before(c.pair.Leaf.NotAfter) {
		return nil
	}
	return []string{fmt.Sprintf("%s.cert_file: %s expired on %s; clients will refuse it", section, c.CertFile, c.pair.Leaf.NotAfter.Format(time.DateOnly))}
}

// serverTLS returns the configuration of a listener that uses the certificate which
// is in use at the time of each handshake.
func serverTLS(inUse *atomic.Pointer[tls.Certificate]) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return inUse.Load(), nil },
	}
}
