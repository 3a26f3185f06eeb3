// Package cluster lets several proxies in front of the same replicas share their state over
// Redis or Valkey: what was sent where, the API keys' usage and the stored responses.
package cluster

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Settings say which Redis the proxies share.
type Settings struct {
	URL          string `mapstructure:"url"`                                  // empty: this proxy is alone
	Mode         string `mapstructure:"mode" oneof:"single sentinel cluster"` // see ModeSingle
	PasswordFile string `mapstructure:"password_file"`                        // empty: the URL's password, or none
	CAFile       string `mapstructure:"ca_file"`                              // for rediss; empty: the system's authorities
	SecretFile   string `mapstructure:"secret_file"`                          // empty: messages are not signed
	Prefix       string `mapstructure:"prefix"`                               // of all keys
	MaxBytes     int64  `mapstructure:"max_bytes" range:"1MiB..16GiB"`        // of the stream, about

	Password string `mapstructure:"-"` // the content of PasswordFile
	CA       string `mapstructure:"-"` // the content of CAFile
	Secret   string `mapstructure:"-"` // the content of SecretFile
}

// The values of Settings.Mode.
const (
	ModeSingle   = "single"
	ModeSentinel = "sentinel"
	ModeCluster  = "cluster"
)

// What a URL without them means.
const (
	defaultHost = "localhost"
	defaultPort = "6379"
)

// MinSecretBytes is the length of the shortest Settings.Secret.
const MinSecretBytes = 16

// CheckSettings returns why a client cannot be made of the settings.
func CheckSettings(s Settings) error {
	_, err := s.clientOptions()
	return err
}

// clientOptions returns the options of the client. An error is about Settings.URL, which it does not show.
func (s *Settings) clientOptions() (o clientOptions, err error) {
	u, err := url.Parse(s.URL)
	if err != nil { // its text has the URL, and so the password
		return o, errors.New("is not a valid URL; expected one such as " + s.urlForm())
	}
	if o, err = s.parseURL(u); err != nil {
		return o, fmt.Errorf("%w; expected a URL such as %s", err, s.urlForm())
	}
	o.login.password = cmp.Or(s.Password, o.login.password)
	o.tls, err = s.tlsConfig(o.tls)
	return o, err
}

// urlForm returns an example of a URL for the mode.
func (s *Settings) urlForm() string {
	switch s.Mode {
	case ModeSentinel:
		return "redis://sentinel:26379?master_name=mymaster&addr=sentinel2:26379"
	case ModeCluster:
		return "redis://host:6379?addr=host2:6379"
	}
	return "redis://host:6379, or rediss:// for TLS"
}

// parseURL returns the options that the URL has.
func (s *Settings) parseURL(u *url.URL) (o clientOptions, err error) {
	password, _ := u.User.Password()
	given := login{u.User.Username(), password}
	query := u.Query()
	o = clientOptions{mode: s.Mode, network: "tcp", login: given}
	database := cmp.Or(query.Get("db"), strings.Trim(u.Path, "/"), "0")
	known := []string{"db"}
	switch {
	case u.Scheme == "redis":
	case u.Scheme == "rediss":
		o.tls = &tls.Config{ServerName: cmp.Or(u.Hostname(), defaultHost), MinVersion: tls.VersionTLS12}
		known = append(known, "skip_verify")
		if value := query.Get("skip_verify"); value != "" {
			if o.tls.InsecureSkipVerify, err = strconv.ParseBool(value); err != nil {
				return o, errors.New("skip_verify is neither true nor false")
			}
		}
	case u.Scheme == "unix" && s.Mode == ModeSingle:
		o.network, o.addresses, database = "unix", []string{u.Path}, cmp.Or(query.Get("db"), "0")
	default:
		return o, fmt.Errorf("invalid URL scheme %q", u.Scheme)
	}
	if o.network == "tcp" {
		o.addresses = []string{net.JoinHostPort(cmp.Or(u.Hostname(), defaultHost), cmp.Or(u.Port(), defaultPort))}
	}
	if s.Mode != ModeSingle {
		known = append(known, "addr")
		for _, address := range query["addr"] {
			if host, port, err := net.SplitHostPort(address); err != nil || host == "" || port == "" {
				return o, errors.New("addr is not a host and a port")
			}
			o.addresses = append(o.addresses, address)
		}
	}
	if s.Mode == ModeSentinel {
		known = append(known, "master_name", "username", "password")
		o.sentinelLogin, o.login = given, login{query.Get("username"), query.Get("password")}
		if o.masterName = query.Get("master_name"); o.masterName == "" {
			return o, errors.New("has no master_name")
		}
	}
	for name := range query {
		if !slices.Contains(known, name) {
			return o, fmt.Errorf("unknown parameter %q", name)
		}
	}
	if o.database, err = strconv.Atoi(database); err != nil || o.database < 0 || o.database > 0 && s.Mode == ModeCluster {
		return o, errors.New("invalid number of a database")
	}
	return o, nil
}

func (s *Settings) tlsConfig(c *tls.Config) (*tls.Config, error) {
	switch {
	case s.CA == "":
		return c, nil
	case c == nil:
		return nil, errors.New("does not begin with rediss://, but redis.ca_file is given; change one of the two")
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM([]byte(s.CA)) {
		return nil, fmt.Errorf("%s contains no certificate; expected PEM, beginning with -----BEGIN CERTIFICATE-----", s.CAFile)
	}
	return c, nil
}
