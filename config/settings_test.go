package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSettingBounds checks that each number has bounds in its tag, and that they can be read.
func TestSettingBounds(t *testing.T) {
	elsewhere := []string{ // with a condition or an advice of their own
		"routing.queue.bytes", "routing.queue.low_priority_bytes", "routing.queue.none_ready_timeout", "routing.queue.busy_timeout",
		"breaker.open_time", "keys[].queue_time",
	}
	all := settingsOf(reflect.ValueOf(Config{}), "", false)
	all = append(all, settingsOf(reflect.ValueOf(Backend{}), "backends[].", false)...)
	all = append(all, settingsOf(reflect.ValueOf(Key{}), "keys[].", false)...)
	for _, s := range all {
		bounds, _ := strings.CutPrefix(s.tag.Get("range"), "0|")
		decode := map[string]func(any) (any, error){"int": decodeInt, "int64": decodeByteSize, "float64": decodeFloat,
			"time.Duration": decodeDuration}[s.value.Type().String()]
		if decode == nil || slices.Contains(elsewhere, s.path) {
			if bounds != "" {
				t.Errorf("%s has bounds", s.path)
			}
			continue
		}
		low, high, _ := strings.Cut(bounds, "..")
		if _, err := decode(low); err != nil {
			t.Errorf("%s: minimum: %v", s.path, err)
		}
		if _, err := decode(high); err != nil && (high != "" || s.value.Type() != reflect.TypeFor[time.Duration]()) {
			t.Errorf("%s: maximum: %v", s.path, err)
		}
	}
}

func TestDiff(t *testing.T) {
	const backends = "backends: [{url: \"http://a:8000\", weight: 2}]\n"
	old := mustLoad(t, backends)
	for _, c := range []struct {
		yaml                string
		reloadable, restart []string
	}{
		{backends, nil, nil},
		{backends + "timeouts: {first_byte: 1s, read_header: 1s}", []string{"timeouts.first_byte"}, []string{"timeouts.read_header"}},
		{backends + "limits: {body_bytes: 1MiB, header_bytes: 8KiB}", []string{"limits.body_bytes"}, []string{"limits.header_bytes"}},
		{backends + "index: {block_bytes: 512}\nrecording: {keep: 9}\nlisten: :1", nil,
			[]string{"listen", "index.block_bytes", "recording.keep"}},
		{backends + "dns: {interval: 1s, server: \"10.0.0.53:53\"}", []string{"dns.interval"}, []string{"dns.server"}},
		{backends + "routing: {queue: {none_ready_timeout: 1s}, attempts: 1}", []string{"routing.queue.none_ready_timeout", "routing.attempts"},
			nil},
		{"backends: [{url: \"http://a:8000\", weight: 3}]", []string{"backends"}, nil},
		{backends + "keys: [{name: a, sha256: " + aHash + "}]", []string{"keys"}, nil},
	} {
		reloadable, restart := Diff(old, mustLoad(t, c.yaml))
		slices.Sort(reloadable)
		slices.Sort(c.reloadable)
		if !slices.Equal(reloadable, c.reloadable) || !slices.Equal(restart, c.restart) {
			t.Errorf("%s: got %q and %q, want %q and %q", c.yaml, reloadable, restart, c.reloadable, c.restart)
		}
	}
}

func TestCheckNotWeakened(t *testing.T) {
	const backends = "backends: [\"http://a:8000\"]\n"
	const open = "; if this is intended, restart or do a binary upgrade"
	for _, c := range []struct{ old, new, want string }{
		{"keys: [{name: a, sha256: " + aHash + "}]", "", "keys: refusing to remove all keys: access would become open" + open},
		{"admin_token: " + plainKey, "", "admin_token: refusing to remove the admin token: admin access would become open" + open},
		{"tenant: isolate", "", "tenant: refusing to end the isolation of tenants: routing would reveal what others sent" + open},
		{"", "keys: [{name: a, sha256: " + aHash + "}]\nadmin_token: " + plainKey + "\ntenant: isolate", ""},
	} {
		got := ""
		if err := mustLoad(t, backends+c.new).CheckNotWeakened(mustLoad(t, backends+c.old)); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%q to %q: got %q, want %q", c.old, c.new, got, c.want)
		}
	}
}
