package config

import (
	"fmt"
	"strings"
	"time"

	"warmroute/proxy/apikey"
)

const (
	maxKeys             = 10_000 // metrics have a series for each key
	minAdminTokenLength = 16
	// maxQueueTime is the completion window of batch services. A client that waits longer has most likely gone.
	maxQueueTime = 24 * time.Hour
)

// APIKeys returns the keys in the form in which the proxy uses them: entries of one
// name are one key. The configuration must be valid.
func (c *Config) APIKeys() []apikey.Key {
	var list []apikey.Key
	index := map[string]int{}
	for _, k := range c.Keys {
		i, listed := index[k.Name]
		if !listed {
			i = len(list)
			index[k.Name] = i
			list = append(list, k.Key)
		}
		key := &list[i]
		if k.SHA256 != "" {
			hash, _ := apikey.ParseHash(k.SHA256)
			key.Hashes = append(key.Hashes, hash)
		}
		for _, s := range k.secrets {
			key.Hashes = append(key.Hashes, s.Hash)
		}
	}
	return list
}

// validateKeys validates each API key, that keys are unique, and that entries of one name
// agree. The errors show only positions: a key may be in the wrong place.
func (c *Config) validateKeys(errs *errorList) {
	if errs.hasAny("keys") {
		return
	}
	if len(c.Keys) > maxKeys {
		errs.add("keys", "the list has %d keys; the maximum is %d, since metrics have a series for each", len(c.Keys), maxKeys)
		return
	}
	names, hashes := map[string]int{}, map[apikey.Hash]string{}
	for i, k := range c.Keys {
		at := fmt.Sprintf("keys[%d]", i)
		if errs.hasAny(at) {
			continue
		}
		validateTags(errs, k, at+".")
		if k.QueueTime != 0 && (k.QueueTime < time.Millisecond || k.QueueTime > maxQueueTime) {
			errs.add(at+".queue_time", "%v is not between 1ms and %v; remove it to use routing.queue.none_ready_timeout and .busy_timeout",
				k.QueueTime, maxQueueTime)
		}
		if !apikey.IsValidName(k.Name) {
			errs.add(at+".name", "is not a valid name: %s", apikey.NameRule)
			continue
		}
		if first, listed := names[k.Name]; !listed {
			names[k.Name] = i
		} else if differing := differingSettings(c.Keys[first].Key, k.Key); len(differing) > 0 {
			var names []string
			for _, s := range differing {
				names = append(names, s.name)
			}
			errs.add(at, "has the name of keys[%d], so both are one key, but they differ in %s; give both the same values, or rename one", first,
				strings.Join(names, ", "))
		}
		c.validateKeyHashes(errs, at, k, hashes)
	}
}

// validateKeyHashes validates the hashes of the key at path at. seen has the path of
// each hash that was seen before.
func (c *Config) validateKeyHashes(errs *errorList, at string, k Key, seen map[apikey.Hash]string) {
	if k.SHA256 == "" && len(k.secrets) == 0 {
		switch {
		case errs.hasAny(at + ".sha256"):
		case c.KeysFile == "":
			errs.add(at, "has no key; set sha256, or set keys_file and add a line for it there")
		case !errs.hasAny("keys_file"):
			errs.add(at, "has no key; set sha256, or add a line for it to %s", c.KeysFile)
		}
		return
	}
	if k.SHA256 != "" {
		hash, err := apikey.ParseHash(k.SHA256)
		if err != nil {
			errs.add(at+".sha256", "%v; plain keys belong in keys_file", err)
			return
		}
		if first, taken := seen[hash]; taken {
			errs.add(at+".sha256", "is the same key as %s; create another one", first)
		}
		seen[hash] = at
	}
	for _, s := range k.secrets {
		line := fmt.Sprintf("%s: line %d", c.KeysFile, s.Line)
		if first, taken := seen[s.Hash]; taken {
			errs.add(line, "is the same key as %s; create another one", first)
		}
		seen[s.Hash] = line
	}
}

func (c *Config) validateAdminToken(errs *errorList) {
	at := "admin_token"
	if c.AdminTokenFile != "" {
		at = "admin_token_file"
	}
	switch {
	case c.AdminToken == "" || errs.hasAny(at):
	case !IsHeaderValue(c.AdminToken):
		errs.add(at, "contains characters that are not allowed in a header; does it end with a line break?")
	case len(c.AdminToken) < minAdminTokenLength:
		errs.add(at, "is shorter than %d characters and could be guessed; create one with openssl rand -hex 32", minAdminTokenLength)
	}
}
