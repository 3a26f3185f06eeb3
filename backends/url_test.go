package backends

import (
	"strings"
	"testing"
)

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]string{
		"http://gpu1:8000":         "http://gpu1:8000",
		"http://gpu1:8000/":        "http://gpu1:8000",
		"HTTPS://GPU1":             "https://gpu1",
		"http://gpu1/replica/a//":  "http://gpu1/replica/a",
		"http://gpu1/a%2Fb/":       "http://gpu1/a%2Fb",
		"http://[fd00::1]:8000":    "http://[fd00::1]:8000",
		"http://10.0.0.1:65535/v2": "http://10.0.0.1:65535/v2",
	} {
		u, err := ParseURL(raw)
		if err != nil {
			t.Errorf("%q: %v", raw, err)
		} else if u.String() != want {
			t.Errorf("%q became %q, want %q", raw, u, want)
		}
	}
}

func TestParseURLErrors(t *testing.T) {
	for raw, want := range map[string]string{
		"":                        "write http://HOST:PORT",
		"gpu1:8000":               "write http://HOST:PORT",
		"10.0.0.1:8000":           "write http://HOST:PORT",
		"tcp://gpu1:8000":         "http or https",
		"http://":                 "no host",
		"http://:8000":            "no host",
		"http://gpu1:":            "remove the colon",
		"http://gpu1:0":           "between 1 and 65535",
		"http://gpu1:65536":       "between 1 and 65535",
		"http://gpu1:http":        "invalid port",
		"http://gpu1:8000/v1":     "remove the /v1",
		"http://gpu1:8000/a/v1/":  "remove the /v1",
		"http://gpu1/a/../b":      "must not contain //",
		"http://key@gpu1":         "api_key",
		"http://gpu1?a=b":         "remove the query",
		"http://gpu1?":            "remove the query",
		"http://gpu1#top":         "remove the fragment",
		"http://gpu1/#":           "remove the fragment",
		"http://me:s3cret@gpu 1/": "invalid",
	} {
		_, err := ParseURL(raw)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want a word about %q", raw, err, want)
		}
	}
}

func TestParseURLHidesPasswords(t *testing.T) {
	for _, raw := range []string{
		"http://me:s3cret@gpu1", "http://me:s3cret@gpu 1", "http://me:s3cret@gpu1:x", "me:s3cret@gpu1", "tcp://me:s3cret@gpu1",
	} {
		if _, err := ParseURL(raw); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", raw, err)
		}
	}
}

func TestDefaultName(t *testing.T) {
	for raw, want := range map[string]string{
		"http://gpu1:8000/a":    "gpu1:8000/a",
		"http://gpu1":           "gpu1:80",
		"https://gpu1":          "gpu1:443",
		"http://[fd00::1]":      "[fd00::1]:80",
		"http://[fd00::1]:8000": "[fd00::1]:8000",
	} {
		u, err := ParseURL(raw)
		if err != nil {
			t.Fatal(err)
		}
		if b := New("", u, "", nil); b.Name != want {
			t.Errorf("%s is named %q, want %q", raw, b.Name, want)
		}
	}
}
