// Package apikey finds the API key that a client presents, and enforces the limits of each key.
package apikey

import (
	"cmp"
	"crypto/sha256"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/metrics"
)

// Hash is the SHA-256 hash of a secret. A fast hash is sufficient for long random
// secrets, which cannot be guessed, and it is computed for each request.
type Hash [sha256.Size]byte

// HashOf returns the hash of a secret as a client presents it.
func HashOf(secret string) Hash {
	var buf [128]byte // avoids an allocation for most secrets
	return sha256.Sum256(append(buf[:0], secret...))
}

// Key is the configuration of one API key. A limit of 0 is no limit.
type Key struct {
	Name   string `mapstructure:"name"` // unique; used in metrics
	Hashes []Hash `mapstructure:"-"`    // of each secret that is this key; several while one replaces another

	Models            []string `mapstructure:"models"` // ids that it may use; nil: all
	RequestsPerMinute int      `mapstructure:"requests_per_minute" range:"0..1073741824"`
	TokensPerMinute   int      `mapstructure:"tokens_per_minute" range:"0|1000..1099511627776"` // of prompts and completions
	// of requests that only tokenize; 0: as tokens allow
	TokenizeBytesPerMinute int `mapstructure:"tokenize_bytes_per_minute" range:"0|1000..1099511627776"`
	Concurrency            int `mapstructure:"concurrency" range:"0..1073741824"` // requests at once
	Priority               int `mapstructure:"priority" range:"-100..100"`        // lower first; a request may only raise it
	// maximum time in the admission queue; 0: routing.queue.none_ready_timeout and .busy_timeout
	QueueTime    time.Duration `mapstructure:"queue_time"`
	SLOTTFT      time.Duration `mapstructure:"slo_ttft" range:"0s..24h"` // target for the time to first token; 0: slo.ttft
	RouteHeaders bool          `mapstructure:"route_headers"`
	Expires      time.Time     `mapstructure:"expires"` // zero: never
}

// MayUse reports whether the key may be used for the model.
func (k *Key) MayUse(model string) bool { return k.Models == nil || slices.Contains(k.Models, model) }

// tokenizeBytesPerToken is how many bytes may be tokenized for each token of a key without a limit of its own for them: agents
// count a prompt several times before they send it, and a token has about 4 bytes.
const tokenizeBytesPerToken = 40

// tokenizeBytesLimit returns how many bytes a minute may be tokenized; 0: no limit.
func (k *Key) tokenizeBytesLimit() int {
	return cmp.Or(k.TokenizeBytesPerMinute, tokenizeBytesPerToken*k.TokensPerMinute)
}

// Expired reports whether the key has expired.
func (k *Key) Expired() bool { return !k.Expires.IsZero() && !time.Now().Before(k.Expires) }

// Set is the valid keys. It is safe for concurrent use.
type Set struct {
	replacing sync.Mutex
	valid     atomic.Pointer[table]
	sharing   sharing
}

// table is not modified after it is stored.
type table struct {
	accounts []*Account // in the order of the configuration
	byHash   map[Hash]*Account
}

// New returns a Set of the keys.
func New(list []Key) *Set {
	s := new(Set)
	s.valid.Store(&table{})
	s.Replace(list)
	return s
}

// Replace replaces the valid keys. A key with the name of a previous one keeps its usage; requests
// with a removed key continue. No two keys may have a name or a hash in common.
func (s *Set) Replace(list []Key) {
	s.replacing.Lock()
	defer s.replacing.Unlock()
	previous := map[string]*Account{}
	for _, a := range s.valid.Load().accounts {
		previous[a.Name] = a
	}
	next := &table{byHash: map[Hash]*Account{}}
	for _, k := range list {
		a := newAccount(k, previous[k.Name], &s.sharing)
		next.accounts = append(next.accounts, a)
		for _, hash := range k.Hashes {
			next.byHash[hash] = a
		}
	}
	s.valid.Store(next)
}

// Empty reports whether there are no keys, so that access is open.
func (s *Set) Empty() bool { return len(s.valid.Load().accounts) == 0 }

// Find returns the account of a secret that a client presented. Only its hash is
// compared, so the time that this takes reveals nothing about the valid secrets.
func (s *Set) Find(secret string) (a *Account, ok bool) {
	a, ok = s.valid.Load().byHash[HashOf(secret)]
	return a, ok
}

// FindName returns the account of the key with that name, or nil.
func (s *Set) FindName(name string) *Account {
	for _, a := range s.valid.Load().accounts {
		if a.Name == name {
			return a
		}
	}
	return nil
}

// Usage returns the usage of each valid key.
func (s *Set) Usage() []metrics.KeyUsage {
	var out []metrics.KeyUsage
	for _, a := range s.valid.Load().accounts {
		out = append(out, a.usage.snapshot(a.Name))
	}
	return out
}

// maxSecretBytes bounds what is hashed of what a client presents.
const maxSecretBytes = 4 << 10

// Bearer returns the Bearer token in a request's Authorization header. It returns "" if there is none,
// or more than one such header, which servers may interpret differently.
func Bearer(h http.Header) string {
	scheme, secret, _ := strings.Cut(onlyValue(h["Authorization"]), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.Trim(secret, " ")
}

// XAPIKey returns the value of a request's X-Api-Key header. It returns "" if there is none, or more
// than one.
func XAPIKey(h http.Header) string { return onlyValue(h["X-Api-Key"]) }

// onlyValue returns the only one of the values, "" if it is too long for a secret or not the only one.
func onlyValue(values []string) string {
	if len(values) != 1 || len(values[0]) > maxSecretBytes {
		return ""
	}
	return values[0]
}
