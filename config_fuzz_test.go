package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzConfig: whatever a file holds, loading ends in a configuration that
// keeps every rule or in faults of one line each.
func FuzzConfig(f *testing.F) {
	f.Add(defaultsYAML)
	for _, seed := range []string{
		"", "listen", "- a", "listen: [", "\x00", "poll: {interval: 5}\nbackends: [http://a:1, null, {url: 7}]",
		"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nbackends: [*c,*c,*c,*c]",
		"? {a: b}\n: c", "1: 2\n? [a]\n: {b: c}", "<<: {listen: \":1\"}", "limits: {body_bytes: 1e400}", "a: &a {b: *a}",
		"\"routing.policy\": prefix", "Listen: \":1\"", "poll:\n  interval: 2001-01-01", "listen: !!binary aGk=", "---\na: 1\n---\nb: 2",
	} {
		f.Add([]byte(seed))
	}
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	addConfigFlags(flags)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseConfig("fuzz.yaml", data, flags, nil)
		var listed ConfigError
		if err != nil {
			if !errors.As(err, &listed) || len(listed) == 0 {
				t.Fatalf("not a list of faults: %v", err)
			}
			if strings.Count(err.Error(), "\n") != len(listed)-1 {
				t.Fatalf("a fault broke out of its line: %q", err)
			}
			return
		}
		again := faults{}
		if c.check(&again); again.err() != nil || len(c.Backends) == 0 {
			t.Fatalf("accepted %+v: %v", c, again.err())
		}
	})
}
