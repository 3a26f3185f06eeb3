// Package apikey knows the API keys that clients may come with, what each of them
// may do, and what it has used.
package apikey

import (
	"crypto/sha256"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Hash is the SHA-256 of a key. A plain, fast hash is right for keys that are
// long and random: there is nothing to guess, and each request pays for it.
type Hash [sha256.Size]byte

// HashOf returns the hash of a key as a client presents it.
func HashOf(secret string) Hash {
	var room [128]byte // most keys fit, and then nothing is allocated
	return sha256.Sum256(append(room[:0], secret...))
}

// Key is what the configuration says of one API key. The zero value of each
// bound is none.
type Key struct {
	Name   string `mapstructure:"name"` // unique; used in metrics
	Hashes []Hash `mapstructure:"-"`    // of each secret that is this key; several while one replaces another

	Models            []string      `mapstructure:"models"` // ids that it may use; nil: all
	RequestsPerMinute int           `mapstructure:"requests_per_minute"`
	TokensPerMinute   int           `mapstructure:"tokens_per_minute"` // of prompts and completions
	Concurrency       int           `mapstructure:"concurrency"`       // requests at once
	Priority          int           `mapstructure:"priority"`          // lower first; a request may only raise it
	QueueTime         time.Duration `mapstructure:"queue_time"`        // maximum time in the admission queue; 0: routing.queue.time
	RouteHeaders      bool          `mapstructure:"route_headers"`
	Expires           time.Time     `mapstructure:"expires"` // zero: never
}

// Set is the keys that are valid now. Safe for concurrent use.
type Set struct {
	replacing sync.Mutex
	valid     atomic.Pointer[table]
}

// table is never modified once published.
type table struct {
	holders []*Holder // in the order of the configuration
	byHash  map[Hash]*Holder
}

// New makes a Set of the keys that a configuration has.
func New(list []Key) *Set {
	s := new(Set)
	s.valid.Store(&table{})
	s.Replace(list)
	return s
}

// Replace makes list the keys that are valid. One that stays, by its name, keeps
// its counts and what it has used of its rates; requests of one that is gone go on
// to their end. No two keys of list have a name or a hash in common.
func (s *Set) Replace(list []Key) {
	s.replacing.Lock()
	defer s.replacing.Unlock()
	before := map[string]*Holder{}
	for _, h := range s.valid.Load().holders {
		before[h.Name] = h
	}
	next := &table{byHash: map[Hash]*Holder{}}
	for _, k := range list {
		h := newHolder(k, before[k.Name])
		next.holders = append(next.holders, h)
		for _, hash := range k.Hashes {
			next.byHash[hash] = h
		}
	}
	s.valid.Store(next)
}

// Open reports whether there are no keys, so that everybody may come in.
func (s *Set) Open() bool { return len(s.valid.Load().holders) == 0 }

// Find returns who holds the key that a client presented. The key is hashed and
// only the hash looked up: how long that takes tells something of the hash of what
// was presented, from which no key can be made.
func (s *Set) Find(presented string) (h *Holder, known bool) {
	h, known = s.valid.Load().byHash[HashOf(presented)]
	return h, known
}

// Named returns the holder of the key of that name, nil when there is none.
func (s *Set) Named(name string) *Holder {
	for _, h := range s.valid.Load().holders {
		if h.Name == name {
			return h
		}
	}
	return nil
}

// Use is what one key was used for since it was configured.
type Use struct {
	Name                           string
	InFlight                       int64
	Requests                       int64 // let in
	PromptTokens, CompletionTokens int64
	Refused                        map[Reason]int64
}

// Uses tells of every valid key.
func (s *Set) Uses() []Use {
	var out []Use
	for _, h := range s.valid.Load().holders {
		out = append(out, h.account.use(h.Name))
	}
	return out
}

// MayUse reports whether the key is for this model.
func (k *Key) MayUse(model string) bool { return k.Models == nil || slices.Contains(k.Models, model) }

// Expired reports whether the key was valid once.
func (k *Key) Expired() bool { return !k.Expires.IsZero() && !time.Now().Before(k.Expires) }
