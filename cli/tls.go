package cli

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"

	"warmroute/config"
)

// LoadCAFile reads certificate authorities from the file that --ca-file names, and returns a TLS configuration that trusts
// them alone.
func LoadCAFile(caFile string) (*tls.Config, error) {
	text, err := config.ReadFileOrPipe(caFile)
	if err != nil {
		return nil, UsageError{fmt.Errorf("--ca-file: %w", err)}
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--ca-file: %s has no certificate in PEM format", caFile)
	}
	return &tls.Config{RootCAs: pool}, nil
}

// loadPinnedTLSConfig reads a certificate from a file, and returns a TLS configuration that accepts this
// one alone, whatever its name: a listener of the same machine is reached by its address.
func loadPinnedTLSConfig(certFile string) (*tls.Config, error) {
	text, err := config.ReadRegularFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %w: use --ca-file instead", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %s has no certificate in PEM format", certFile)
	}
	verify := func(s tls.ConnectionState) error {
		if !bytes.Equal(s.PeerCertificates[0].Raw, block.Bytes) {
			return &tls.CertificateVerificationError{Err: fmt.Errorf("it is not the one in %s", certFile)}
		}
		return nil
	}
	return &tls.Config{InsecureSkipVerify: true, VerifyConnection: verify}, nil
}

// DescribeTLSError returns what is wrong with the certificate or the scheme of a URL if a request to it failed with err for
// that, and what to do; else nil. urlFlag is the flag that gave the URL, such as --admin.
func DescribeTLSError(err error, url, urlFlag string) error {
	if unverified, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		advice := "name its authority with --ca-file"
		if _, ok := errors.AsType[x509.HostnameError](err); ok {
			advice = "name a host that it is valid for with " + urlFlag
		}
		return fmt.Errorf("verify the certificate of %s: %w: %s", url, unverified.Err, advice)
	}
	// An http.Client returns the first error for a response of HTTP, an http.Transport the second one.
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok || errors.Is(err, http.ErrSchemeMismatch) {
		return fmt.Errorf("%s does not use https: use %s http://…", url, urlFlag)
	}
	return nil
}

// IsHTTPSRequired reports whether a response is that of a server to a request without TLS where it requires TLS, by the
// texts of net/http, nginx and Apache.
func IsHTTPSRequired(status int, body []byte) bool {
	if status != http.StatusBadRequest {
		return false
	}
	for _, text := range []string{"HTTP request to an HTTPS server", "plain HTTP request was sent to HTTPS port",
		"speaking plain HTTP to an SSL-enabled server port"} {
		if bytes.Contains(body, []byte(text)) {
			return true
		}
	}
	return false
}
