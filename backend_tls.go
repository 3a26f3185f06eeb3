package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strings"

	"warmroute/backends"
)

// tlsConfig says how the replica of an https URL is recognized: by the authorities
// in ca_file alone, or by the system's where there is none. nil is the defaults.
func (b BackendConfig) tlsConfig() (*tls.Config, error) {
	if b.CAFile == "" && b.ServerName == "" {
		return nil, nil
	}
	c := &tls.Config{ServerName: b.ServerName}
	if b.CAFile == "" {
		return c, nil
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM([]byte(b.authority)) {
		return nil, fmt.Errorf("%s holds no certificate; it has to be in PEM form, beginning with -----BEGIN CERTIFICATE-----", b.CAFile)
	}
	return c, nil
}

// readAuthorities reads the files of those who signed the replicas' certificates.
func (c *Config) readAuthorities(f *faults) {
	for i := range c.Backends {
		b := &c.Backends[i]
		// Where it is of no use the check says that.
		if u, err := backends.ParseURL(b.URL); b.CAFile == "" || err != nil || u.Scheme != "https" {
			continue
		}
		data, err := readFile(b.CAFile)
		if err != nil {
			f.add(fmt.Sprintf("backends[%d].ca_file", i), "%v", err)
		}
		b.authority = string(data)
	}
}

// checkBackendTLS looks at what is said of a backend's certificate. at is the
// backend's path, scheme that of its URL.
func checkBackendTLS(f *faults, at, scheme string, b BackendConfig) {
	for _, setting := range []struct{ path, value string }{{at + ".ca_file", b.CAFile}, {at + ".server_name", b.ServerName}} {
		if setting.value != "" && scheme != "https" {
			f.add(setting.path, "changes nothing for %s; make it https:// or drop this", b.URL)
		}
	}
	if strings.ContainsFunc(b.ServerName, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' || r == ':' }) {
		f.add(at+".server_name", "%q is no name of a host; write the one in the replica's certificate, without scheme and port", b.ServerName)
	}
	if f.blames(at + ".ca_file") {
		return
	}
	if _, err := b.tlsConfig(); err != nil {
		f.add(at+".ca_file", "%v", err)
	}
}
