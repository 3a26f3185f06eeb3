package main

import (
	"crypto/tls"
	"sync/atomic"
)

// serverTLS returns the configuration of a listener that uses the certificate which
// is in use at the time of each handshake.
func serverTLS(inUse *atomic.Pointer[tls.Certificate]) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return inUse.Load(), nil },
	}
}
