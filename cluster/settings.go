// Package cluster lets several proxies in front of the same replicas share their state over
// Redis or Valkey: what was sent where, the API keys' usage and the stored responses.
package cluster

import (
	"log/slog"

	"warmroute/cluster/redis"
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
	ModeSingle   = redis.ModeSingle
	ModeSentinel = redis.ModeSentinel
	ModeCluster  = redis.ModeCluster
)

// MinSecretBytes is the length of the shortest Settings.Secret.
const MinSecretBytes = 16

// CheckSettings returns why a client cannot be made of the settings. It is about Settings.URL, which it does not show.
func CheckSettings(s Settings) error { return redis.CheckOptions(s.redisOptions(nil)) }

func (s *Settings) redisOptions(log *slog.Logger) redis.Options {
	return redis.Options{URL: s.URL, Mode: s.Mode, Password: s.Password, CA: s.CA, CAFile: s.CAFile, Log: log}
}
