// Package cluster lets several proxies in front of the same replicas share, over Redis or Valkey,
// what each of them knows: what was sent where, the API keys' usage and the stored responses.
package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Settings say which Redis the proxies share.
type Settings struct {
	URL          string `mapstructure:"url"`           // empty: this proxy is alone
	Mode         string `mapstructure:"mode"`          // one of Modes
	PasswordFile string `mapstructure:"password_file"` // empty: the URL's password, or none
	CAFile       string `mapstructure:"ca_file"`       // for rediss; empty: the system's authorities
	Prefix       string `mapstructure:"prefix"`        // of all keys
	MaxBytes     int64  `mapstructure:"max_bytes"`     // of the stream, about

	Password string `mapstructure:"-"` // the content of PasswordFile
	CA       string `mapstructure:"-"` // the content of CAFile
}

// The values of Settings.Mode.
const (
	ModeSingle   = "single"
	ModeSentinel = "sentinel"
	ModeCluster  = "cluster"
)

// Modes are the values of Settings.Mode.
var Modes = []string{ModeSingle, ModeSentinel, ModeCluster}

const (
	dialTimeout = time.Second
	// commandTimeout bounds every command but the blocking read, which takes readBlock longer.
	commandTimeout = time.Second
	readBlock      = 500 * time.Millisecond
)

// CheckSettings returns why a client cannot be made of the settings.
func CheckSettings(s Settings) error {
	c, err := newClient(s)
	if err != nil {
		return err
	}
	return c.Close()
}

// newClient returns a client, which connects when it is used.
func newClient(s Settings) (redis.UniversalClient, error) {
	switch s.Mode {
	case ModeSentinel:
		o, err := redis.ParseFailoverURL(s.URL)
		if err != nil {
			return nil, err
		}
		if o.MasterName == "" {
			return nil, errors.New("the URL has no master_name, as in redis://sentinel:26379?master_name=mymaster&addr=sentinel2:26379")
		}
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = dialTimeout, commandTimeout, commandTimeout
		o.ContextTimeoutEnabled, o.MaxRetries, o.PoolSize, o.DisableIdentity = true, -1, poolSize, true
		if s.Password != "" {
			o.Password = s.Password
		}
		o.TLSConfig, err = s.tlsConfig(o.TLSConfig)
		return redis.NewFailoverClient(o), err
	case ModeCluster:
		o, err := redis.ParseClusterURL(s.URL)
		if err != nil {
			return nil, err
		}
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = dialTimeout, commandTimeout, commandTimeout
		o.ContextTimeoutEnabled, o.PoolSize, o.DisableIdentity = true, poolSize, true
		if s.Password != "" {
			o.Password = s.Password
		}
		o.TLSConfig, err = s.tlsConfig(o.TLSConfig)
		return redis.NewClusterClient(o), err
	}
	o, err := redis.ParseURL(s.URL)
	if err != nil {
		return nil, err
	}
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = dialTimeout, commandTimeout, commandTimeout
	o.ContextTimeoutEnabled, o.MaxRetries, o.PoolSize, o.DisableIdentity = true, -1, poolSize, true
	if s.Password != "" {
		o.Password = s.Password
	}
	o.TLSConfig, err = s.tlsConfig(o.TLSConfig)
	return redis.NewClient(o), err
}

// poolSize is how many connections are used: one reads, one writes, one is for the snapshot.
const poolSize = 4

// tlsConfig adds the authorities of ca_file to what the URL says.
func (s *Settings) tlsConfig(c *tls.Config) (*tls.Config, error) {
	switch {
	case s.CA == "":
		return c, nil
	case c == nil:
		return nil, errors.New("redis.ca_file is given, but the URL does not begin with rediss://")
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM([]byte(s.CA)) {
		return nil, fmt.Errorf("%s contains no certificate; expected PEM, beginning with -----BEGIN CERTIFICATE-----", s.CAFile)
	}
	return c, nil
}
