// Package cluster lets several proxies in front of the same replicas share their state over
// Redis or Valkey: what was sent where, the API keys' usage and the stored responses.
package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
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

// MinSecretBytes is the length of the shortest Settings.Secret.
const MinSecretBytes = 16

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

// newClient returns a client, which connects when it is used. This is not a method of Settings, nor is what it calls:
// then every package that has Settings would take seconds longer to compile, for the types of the clients.
func newClient(s Settings) (redis.UniversalClient, error) {
	redis.SetLogger(noLog{})
	switch s.Mode {
	case ModeSentinel:
		return newSentinelClient(&s)
	case ModeCluster:
		return newClusterClient(&s)
	}
	return newSingleClient(&s)
}

// noLog discards what the clients log, in a log of the whole process: commands return the same
// errors, and Cluster logs them once a minute.
type noLog struct{}

// Printf implements what redis.SetLogger takes.
func (noLog) Printf(context.Context, string, ...any) {}

func newSingleClient(s *Settings) (redis.UniversalClient, error) {
	o, err := redis.ParseURL(s.URL)
	if err != nil {
		return nil, urlError(err, "redis://host:6379, or rediss:// for TLS")
	}
	if o.TLSConfig, err = s.tlsConfig(o.TLSConfig); err != nil {
		return nil, err
	}
	o.Dialer = newDialer(o.TLSConfig)
	o.Password = cmp.Or(s.Password, o.Password)
	o.DialTimeout, o.DialerRetries, o.ReadTimeout, o.WriteTimeout = dialTimeout, 1, commandTimeout, commandTimeout
	o.ContextTimeoutEnabled, o.MaxRetries, o.PoolSize, o.DisableIdentity = true, -1, poolSize, true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(o), nil
}

func newSentinelClient(s *Settings) (redis.UniversalClient, error) {
	const form = "redis://sentinel:26379?master_name=mymaster&addr=sentinel2:26379"
	o, err := redis.ParseFailoverURL(s.URL)
	if err != nil {
		return nil, urlError(err, form)
	}
	if o.MasterName == "" {
		return nil, errors.New("has no master_name; expected one such as " + form)
	}
	if o.TLSConfig, err = s.tlsConfig(o.TLSConfig); err != nil {
		return nil, err
	}
	o.Dialer = newDialer(o.TLSConfig)
	o.Password = cmp.Or(s.Password, o.Password)
	o.DialTimeout, o.DialerRetries, o.ReadTimeout, o.WriteTimeout = dialTimeout, 1, commandTimeout, commandTimeout
	o.ContextTimeoutEnabled, o.MaxRetries, o.PoolSize, o.DisableIdentity = true, -1, poolSize, true
	return redis.NewFailoverClient(o), nil
}

func newClusterClient(s *Settings) (redis.UniversalClient, error) {
	o, err := redis.ParseClusterURL(s.URL)
	if err != nil {
		return nil, urlError(err, "redis://host:6379?addr=host2:6379")
	}
	if o.TLSConfig, err = s.tlsConfig(o.TLSConfig); err != nil {
		return nil, err
	}
	o.Dialer = newDialer(o.TLSConfig)
	o.Password = cmp.Or(s.Password, o.Password)
	o.DialTimeout, o.DialerRetries, o.ReadTimeout, o.WriteTimeout = dialTimeout, 1, commandTimeout, commandTimeout
	o.ContextTimeoutEnabled, o.PoolSize, o.DisableIdentity = true, poolSize, true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClusterClient(o), nil
}

// urlError returns the error for a URL that cannot be used. An error of package url is left out: it
// has the URL, and so the password.
func urlError(err error, form string) error {
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		return errors.New("is not a valid URL; expected one such as " + form)
	}
	return fmt.Errorf("%w; expected a URL such as %s", err, form)
}

// poolSize is how many connections are used: one reads, one writes, one is for the snapshot,
// one for the records of the fleet.
const poolSize = 4

// maxReplyBytes bounds what is read in reply to one command: more than the messages that are read
// at once. Others may have stored larger values.
const maxReplyBytes = 2 * readCount * maxMessageBytes

var errReplyTooLong = errors.New("reply is too long: the value was not written by warmroute")

// newDialer returns what connects, with TLS unless t is nil.
func newDialer(t *tls.Config) func(ctx context.Context, network, address string) (net.Conn, error) {
	dial := redis.NewDialer(&redis.Options{DialTimeout: dialTimeout, TLSConfig: t})
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &boundedConn{Conn: conn}, nil
	}
}

// boundedConn fails when maxReplyBytes are read without a write in between. It is used by one
// goroutine at a time.
type boundedConn struct {
	net.Conn
	read int
}

func (c *boundedConn) Write(b []byte) (int, error) {
	c.read = 0
	return c.Conn.Write(b)
}

func (c *boundedConn) Read(b []byte) (int, error) {
	if c.read > maxReplyBytes {
		return 0, errReplyTooLong
	}
	n, err := c.Conn.Read(b)
	c.read += n
	return n, err
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
