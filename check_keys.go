package main

import (
	"fmt"
	"net"
	"time"

	"warmroute/proxy/apikey"
)

const (
	// mostKeys bounds the metrics, which tell of each key.
	mostKeys      = 10_000
	shortestToken = 16
	// maxQueueTime is as long as batch services promise an answer in. A client that
	// waits longer than that has most likely gone without a word.
	maxQueueTime = 24 * time.Hour
)

// checkKeys looks at each key by itself and for two that are one. Faults show
// nothing but places: a key may stand where it should not.
func (c *Config) checkKeys(f *faults) {
	oneOf(f, "tenant", c.Tenant, "share", "isolate")
	if f.blames("keys") {
		return
	}
	if len(c.Keys) > mostKeys {
		f.add("keys", "are %d; more than %d cannot be told apart in metrics", len(c.Keys), mostKeys)
		return
	}
	names, hashes := map[string]string{}, map[apikey.Hash]string{}
	for i, k := range c.Keys {
		at := fmt.Sprintf("keys[%d]", i)
		if f.blames(at) {
			continue
		}
		within(f, at+".requests_per_minute", k.RequestsPerMinute, 0, 1<<30)
		if k.TokensPerMinute != 0 {
			within(f, at+".tokens_per_minute", k.TokensPerMinute, 1000, 1<<40)
		}
		within(f, at+".concurrency", k.Concurrency, 0, 1<<30)
		within(f, at+".priority", k.Priority, -100, 100)
		if k.QueueTime != 0 && (k.QueueTime < time.Millisecond || k.QueueTime > maxQueueTime) {
			f.add(at+".queue_time", "%v is not between 1ms and %v; drop it for routing.hold.time", k.QueueTime, maxQueueTime)
		}
		if !apikey.IsName(k.Name) {
			f.add(at+".name", "cannot be one: %s", apikey.NameRule)
			continue
		}
		if first, taken := names[k.Name]; taken {
			f.add(at+".name", "is already the name of %s; give one of the two another", first)
		}
		names[k.Name] = at
		c.checkHashes(f, at, k, hashes)
	}
}

// checkHashes looks at the secrets of one key. seen holds where each hash was met.
func (c *Config) checkHashes(f *faults, at string, k KeyConfig, seen map[apikey.Hash]string) {
	if k.SHA256 == "" && len(k.secrets) == 0 {
		switch {
		case f.blames(at + ".sha256"):
		case c.KeysFile == "":
			f.add(at, "has no key; give it sha256, or name a file with it in keys_file")
		case !f.blames("keys_file"):
			f.add(at, "has no key; give it sha256, or a line in %s", c.KeysFile)
		}
		return
	}
	if k.SHA256 != "" {
		hash, err := apikey.ParseHash(k.SHA256)
		if err != nil {
			f.add(at+".sha256", "%v; a key in plain belongs into keys_file", err)
			return
		}
		if first, taken := seen[hash]; taken {
			f.add(at+".sha256", "is the same key as %s; make another", first)
		}
		seen[hash] = at
	}
	for _, s := range k.secrets {
		line := fmt.Sprintf("%s: line %d", c.KeysFile, s.Line)
		if first, taken := seen[s.Hash]; taken {
			f.add(line, "is the same key as %s; make another", first)
		}
		seen[s.Hash] = line
	}
}

func (c *Config) checkAdminToken(f *faults) {
	at := "admin_token"
	if c.AdminTokenFile != "" {
		at = "admin_token_file"
	}
	switch {
	case c.AdminToken == "" || f.blames(at):
	case !isHeaderText(c.AdminToken):
		f.add(at, "has characters that no header may carry; was a line end copied with it?")
	case len(c.AdminToken) < shortestToken:
		f.add(at, "is shorter than %d characters and could be guessed; make one with openssl rand -hex 32", shortestToken)
	}
}

// adminWarnings tell of a listener that others can reach.
func (c *Config) adminWarnings() []string {
	host, _, err := net.SplitHostPort(c.Admin)
	switch {
	case err != nil || isLoopback(host) || c.AdminToken != "" && c.AdminTLS.enabled():
		return nil
	case c.AdminToken != "":
		return []string{fmt.Sprintf("admin: %s can be reached from other machines and speaks plain HTTP: the admin token can be read on the network; "+
			"set admin_tls.cert_file and admin_tls.key_file", c.Admin)}
	}
	return []string{fmt.Sprintf("admin: %s can be reached from other machines: /metrics is open to them, all else refuses them until admin_token is set; "+
		"keep it on a private network", c.Admin)}
}
