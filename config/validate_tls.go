package config

import (
	"cmp"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// caWarnings returns a warning for each ca_file with which no connection can be verified.
func (c *Config) caWarnings() []string {
	var warnings []string
	check := func(setting, file, content, rawURL, serverName string) {
		u, err := url.Parse(rawURL)
		if content == "" || err != nil {
			return
		}
		if reason := caMismatch(content, cmp.Or(serverName, u.Hostname()), time.Now()); reason != "" {
			warnings = append(warnings, fmt.Sprintf("%s: %s: %s", setting, file, reason))
		}
	}
	for i, b := range c.Backends {
		check(fmt.Sprintf("backends[%d].ca_file", i), b.CAFile, b.CA, b.URL, b.ServerName)
	}
	check("redis.ca_file", c.Redis.CAFile, c.Redis.CA, c.Redis.URL, "")
	return warnings
}

// caMismatch returns why no server named host can be verified with the certificates of a PEM file;
// "" if one of them may verify it. A certificate of an authority may have signed any other one. That
// of a server, which is in the file if it is self-signed, has to name the host.
func caMismatch(content, host string, now time.Time) string {
	reason := ""
	for rest := []byte(content); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return reason
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			continue
		}
		// OpenSSL marks self-signed certificates of servers as authorities.
		isAuthority := cert.IsCA && !strings.EqualFold(cert.Subject.CommonName, host)
		switch {
		case now.After(cert.NotAfter):
			reason = fmt.Sprintf("the certificate of %q expired on %s; no connection can be verified with it", cert.Subject.CommonName,
				cert.NotAfter.Format(time.DateOnly))
		case isAuthority || cert.VerifyHostname(host) == nil:
			return ""
		default:
			reason = fmt.Sprintf("the certificate of %q does not have %s among its subject alternative names, so connections to it will fail; "+
				"issue one with openssl's -addext subjectAltName=DNS:NAME (or IP:ADDRESS), or for a backend set server_name to a name that it has",
				cert.Subject.CommonName, host)
		}
	}
}
