package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzConfig asserts that loading any file returns a valid configuration or
// errors of one line each.
func FuzzConfig(f *testing.F) {
	f.Add(defaults)
	for _, seed := range []string{
		"", "listen", "- a", "listen: [", "\x00", "poll: {interval: 5}\nbackends: [http://a:1, null, {url: 7}]",
		"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nbackends: [*c,*c,*c,*c]",
		"? {a: b}\n: c", "1: 2\n? [a]\n: {b: c}", "<<: {listen: \":1\"}", "limits: {body_bytes: 1e400}", "a: &a {b: *a}",
		"\"routing.policy\": prefix", "Listen: \":1\"", "poll:\n  interval: 2001-01-01", "listen: !!binary aGk=", "---\na: 1\n---\nb: 2",
	} {
		f.Add([]byte(seed))
	}
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	AddFlags(flags)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parse(defaults, "fuzz.yaml", data, flags, nil)
		var listed Errors
		if err != nil {
			if !errors.As(err, &listed) || len(listed) == 0 {
				t.Fatalf("not a list oerrs errorList: %v", err)
			}
			if strings.Count(err.Error(), "\n") != len(listed)-1 {
				t.Fatalf("an error spans several lines: %q", err)
			}
			return
		}
		again := errorList{}
		if c.validate(&again); again.err() != nil || len(c.Backends) == 0 {
			t.Fatalf("accepted %+v: %v", c, again.err())
		}
	})
}
