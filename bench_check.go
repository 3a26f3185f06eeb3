package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"warmroute/backends"
	"warmroute/config"
)

// maxBenchURLs is how many columns a table can have that people still read.
const maxBenchURLs = 6

// check finds the first mistake in the flags, and says how to mend it.
func (o *benchOptions) check(flags *pflag.FlagSet) error {
	switch {
	case len(o.urls) == 0:
		return fmt.Errorf("--url is missing: name one endpoint to measure, or several to compare, like --url http://127.0.0.1:8080")
	case len(o.urls) > maxBenchURLs:
		return fmt.Errorf("%d URLs do not fit side by side; name %d at most", len(o.urls), maxBenchURLs)
	case o.conversations != 0 && flags.Changed("for"):
		return fmt.Errorf("--for and --conversations both say when to end; name one")
	case o.conversations != 0 && flags.Changed("warmup"):
		return fmt.Errorf("--warmup goes by the clock and --conversations does not; drop one of the two")
	}
	if o.conversations != 0 {
		o.warmup = 0
	}
	if o.rounds == 0 && !flags.Changed("rounds") {
		o.rounds = min(len(o.urls), 2)
	}
	for _, n := range []struct {
		flag         string
		value, least int
		most         int
	}{
		{"rounds", o.rounds, 1, 99},
		{"sessions", o.sessions, 1, 10_000},
		{"turns", o.turns, 1, 1000},
		{"system-prompts", o.systemPrompts, 1, 100_000},
		{"system-tokens", o.systemTokens, 16, 1_000_000},
		{"user-tokens", o.userTokens, 8, 1_000_000},
		{"answer-tokens", o.answerTokens, 2, 100_000},
		{"conversations", o.conversations, 0, 10_000_000},
	} {
		if n.value < n.least || n.value > n.most {
			return fmt.Errorf("--%s %d is not between %d and %d", n.flag, n.value, n.least, n.most)
		}
	}
	if o.conversations != 0 && o.conversations < o.rounds {
		return fmt.Errorf("--conversations %d is less than one for each of %d rounds", o.conversations, o.rounds)
	}
	for _, d := range []struct {
		flag         string
		value, least time.Duration
	}{
		{"for", o.length, time.Second}, {"warmup", o.warmup, 0}, {"think", o.think, 0}, {"timeout", o.timeout, 10 * time.Millisecond},
	} {
		if d.value < d.least || d.value > 24*time.Hour {
			return fmt.Errorf("--%s %v is not between %v and 24h", d.flag, d.value, d.least)
		}
	}
	return nil
}

// targets reads the URLs and their keys.
func (o *benchOptions) targets() ([]*benchTarget, error) {
	keys, err := o.keys()
	if err != nil {
		return nil, err
	}
	var targets []*benchTarget
	for i, raw := range o.urls {
		// What SDKs call a base URL ends in /v1.
		u, err := backends.ParseURL(strings.TrimSuffix(strings.TrimRight(raw, "/"), "/v1"))
		if err != nil {
			return nil, fmt.Errorf("--url: %s", strings.TrimPrefix(strings.Replace(err.Error(), "set api_key instead", "use --api-key-file instead", 1), "backend URL "))
		}
		t := &benchTarget{name: string(rune('A' + i)), url: u.String(), model: o.model}
		if len(keys) > 0 {
			t.key = keys[min(i, len(keys)-1)]
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// keys are one for all URLs, or one for each.
func (o *benchOptions) keys() ([]string, error) {
	if len(o.keyFiles) > 0 && len(o.keyEnvs) > 0 {
		return nil, fmt.Errorf("--api-key-file and --api-key-env both give a key; use one of the two")
	}
	flag, sources, read := "--api-key-file", o.keyFiles, config.ReadFile
	if len(o.keyEnvs) > 0 {
		flag, sources = "--api-key-env", o.keyEnvs
		read = func(variable string) ([]byte, error) { return []byte(os.Getenv(variable)), nil }
	}
	if n := len(sources); n > 1 && n != len(o.urls) {
		return nil, fmt.Errorf("%s is given %d times for %d URLs; give it once for all, or once for each", flag, n, len(o.urls))
	}
	var keys []string
	for _, source := range sources {
		text, err := read(source)
		if err != nil {
			return nil, config.ReadError(flag, source, err)
		}
		key := string(bytes.TrimSpace(text))
		switch {
		case key == "":
			return nil, fmt.Errorf("%s: there is no key in %s", flag, source)
		case !config.IsHeaderValue(key):
			return nil, fmt.Errorf("%s: what is in %s cannot be a key: it has several lines, or characters that no header may carry", flag, source)
		}
		keys = append(keys, key)
	}
	return keys, nil
}
