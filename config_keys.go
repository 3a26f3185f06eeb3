package main

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"warmroute/proxy/apikey"
)

// KeyConfig is one API key. 0 is no bound.
type KeyConfig struct {
	Name   string `mapstructure:"name"`
	SHA256 string `mapstructure:"sha256"`

	Models            []string      `mapstructure:"models"` // nil: all
	RequestsPerMinute int           `mapstructure:"requests_per_minute"`
	TokensPerMinute   int           `mapstructure:"tokens_per_minute"`
	Concurrency       int           `mapstructure:"concurrency"`
	Priority          int           `mapstructure:"priority"`
	QueueTime         time.Duration `mapstructure:"queue_time"` // 0: routing.hold.time
	RouteHeaders      bool          `mapstructure:"route_headers"`
	Expires           time.Time     `mapstructure:"expires"` // zero: never

	secrets []apikey.Secret // of this name in the file of keys
}

// apiKeys are the keys as the proxy takes them. The configuration was checked.
func (c *Config) apiKeys() []apikey.Key {
	var list []apikey.Key
	for _, k := range c.Keys {
		var hashes []apikey.Hash
		if k.SHA256 != "" {
			hash, _ := apikey.ParseHash(k.SHA256)
			hashes = append(hashes, hash)
		}
		for _, s := range k.secrets {
			hashes = append(hashes, s.Hash)
		}
		list = append(list, apikey.Key{
			Name:              k.Name,
			Hashes:            hashes,
			Models:            k.Models,
			RequestsPerMinute: k.RequestsPerMinute,
			TokensPerMinute:   k.TokensPerMinute,
			Concurrency:       k.Concurrency,
			Priority:          k.Priority,
			QueueTime:         k.QueueTime,
			RouteHeaders:      k.RouteHeaders,
			Expires:           k.Expires,
		})
	}
	return list
}

// decodeKeyList keeps keys out of the environment, where they would have no
// names and every child process could read them.
func decodeKeyList(value any) (any, error) {
	if list, ok := value.([]any); ok {
		return list, nil
	}
	return nil, fmt.Errorf("wants a list, not %s; begin each key with \"- name:\", or name a file in keys_file", describe(value))
}

// decodeKey refuses what the decoder would take apart. Its errors show nothing
// of what was given, which may be a key in the wrong place.
func decodeKey(value any) (any, error) {
	given, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("wants a section with name and sha256, not %s; a key in plain belongs into keys_file", describe(value))
	}
	var known []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[KeyConfig]()) {
		if name := field.Tag.Get("mapstructure"); name != "" {
			known = append(known, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		switch near := nearest(name, known); {
		case !slices.Contains(known, name) && near != "":
			return nil, fmt.Errorf("unknown setting near %s; did you mean that?", near)
		case !slices.Contains(known, name):
			return nil, fmt.Errorf("unknown setting; a key has %s", strings.Join(known, ", "))
		case given[name] == nil:
			return nil, fmt.Errorf("%s has no value; give it one or delete the line", name)
		}
	}
	switch models, listed := given["models"].([]any); {
	case given["models"] != nil && !listed:
		return nil, fmt.Errorf("models wants a list, not %s", describe(given["models"]))
	case listed && len(models) == 0:
		return nil, errors.New("models is empty, so the key could do nothing; delete the line for all models")
	}
	return given, nil
}

func decodeTime(value any) (any, error) {
	switch v := value.(type) {
	case time.Time: // YAML knows dates
		return v, nil
	case string:
		for _, layout := range []string{time.DateOnly, time.RFC3339} {
			if t, err := time.Parse(layout, strings.TrimSpace(v)); err == nil {
				return t, nil
			}
		}
		return nil, errors.New("is no time; write it like 2027-01-31 or 2027-01-31T18:00:00Z")
	}
	return nil, fmt.Errorf("wants a time like 2027-01-31, not %s", describe(value))
}

// readAdminToken takes the token from its file, if that is given.
func (c *Config) readAdminToken(f *faults) {
	if c.AdminTokenFile == "" {
		return
	}
	if c.AdminToken != "" {
		f.add("admin_token_file", "admin_token is given as well; drop one of the two")
		return
	}
	token, err := readFile(c.AdminTokenFile)
	if c.AdminToken = strings.TrimSpace(string(token)); err == nil && c.AdminToken == "" {
		err = errors.New(c.AdminTokenFile + " is empty; put the token into it")
	}
	if err != nil {
		f.add("admin_token_file", "%v", err)
	}
}

// readKeysFile adds the keys of the file, if one is given, to those of the list.
func (c *Config) readKeysFile(f *faults) {
	if c.KeysFile == "" {
		return
	}
	data, err := readFile(c.KeysFile)
	if err != nil {
		f.add("keys_file", "%v", err)
		return
	}
	secrets, wrong := apikey.ParseFile(string(data))
	for _, err := range wrong {
		f.add(c.KeysFile+": "+strings.SplitN(err.Error(), ":", 2)[0], "%v", errors.Unwrap(err))
	}
	if len(secrets) == 0 && len(wrong) == 0 {
		f.add("keys_file", "%s has no keys in it; add one, or drop the setting to let everybody in", c.KeysFile)
	}
	at := map[string]int{}
	for i, k := range c.Keys {
		at[k.Name] = i
	}
	for _, s := range secrets {
		i, named := at[s.Name]
		if !named {
			i = len(c.Keys)
			at[s.Name] = i
			c.Keys = append(c.Keys, KeyConfig{Name: s.Name})
		}
		c.Keys[i].secrets = append(c.Keys[i].secrets, s)
	}
}
