package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"warmroute/backends"
)

func TestBackendsFile(t *testing.T) {
	for _, c := range []struct {
		name, content, want string // names of the backends, or an error
	}{
		{"empty", "", ""},
		{"comments alone", "# none yet\n\n", ""},
		{"URLs", "http://a:8000 # the first\nhttps://b\r\ndns://c:8000\n", "a:8000 b:443 c:8000"},
		{"a list", "- http://a:8000\n- {url: http://b:8000, name: gpu-1}\n", "a:8000 gpu-1"},
		{"a list after a comment", "# ours\n\n- http://a:8000\n", "a:8000"},
		{"a mapping", "backends:\n  - url: http://a:8000\n", "a:8000"},
		{"an empty list", "backends: []\n", ""},
		{"another setting", "listen: \":1\"\n", `FILE: unknown setting "listen"; write a list of backends, or one URL a line`},
		{"an invalid URL", "http://a:8000\nftp://b\n", `FILE: backends[1].url: backend URL "ftp://b": the scheme must be http or https`},
		{"an unknown key", "- {url: http://a:8000, wieght: 2}\n", `FILE: backends[0]: unknown key "wieght"; did you mean weight?`},
		{"one that is in the configuration", "http://first:8000\n",
			"FILE: backends[0].url: http://first:8000 is already backends[0]; remove one of the two\nFILE: backends[0].name: first:8000 is " +
				"already the name of backends[0]; rename one of the two"},
		{"a name twice", "- {url: http://a:1, name: x}\n- {url: http://a:2, name: x}\n",
			"FILE: backends[1].name: x is already the name of FILE: backends[0]; rename one of the two"},
		{"not text", "\x00\x01", "FILE: line 1: \"\\x00\" is not allowed; write the file as UTF-8 text"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "backends")
			if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := load(t, "backends: [\"http://first:8000\"]\nbackends_file: "+file+"\n")
			if err != nil {
				if text := strings.ReplaceAll(err.Error(), file, "FILE"); text != c.want {
					t.Errorf("error %q, want %q", text, c.want)
				}
				return
			}
			var names []string
			for _, b := range got.Backends[1:] {
				names = append(names, b.Name)
				if b.Source != backends.FromFile || b.Weight != 1 {
					t.Errorf("%s: source %v, weight %v", b.Name, b.Source, b.Weight)
				}
			}
			if got := strings.Join(names, " "); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestParseAddedBackend(t *testing.T) {
	b, err := ParseAddedBackend([]byte(`{"url":"http://a:8000","weight":2.5,"max_in_flight":7,"device":"gpu0","role":"prefill"}`))
	if err != nil || b.Role != "prefill" || b.Device != "gpu0" || b.Name != "a:8000" || b.Weight != 2.5 || b.MaxInFlight != 7 ||
		b.KVEvents != "auto" || b.Source != backends.FromRegistration {
		t.Errorf("got %+v, %v", b, err)
	}
	for body, want := range map[string]string{
		``:   "url: is missing; set a URL such as http://10.0.0.5:8000",
		`[]`: `the body is not a JSON object such as {"url": "http://10.0.0.5:8000"}`,
		`{"url":"http://a:8000","api_key":"k"}`: "api_key: is only for backends of the configuration and of backends_file; list the " +
			"replica there",
		`{"url":"http://a:8000","weight":"big"}`: `weight: "big" is not a number`,
		`{"url":"http://a:8000/v1"}`:             `url: backend URL "http://a:8000/v1": remove the /v1; it is part of the request path`,
		`{"url":"http://a:8000","nam":"x"}`:      `unknown key "nam"; did you mean name?`,
		`{"url":"http://a:8000","name":"a b"}`: `name: "a b" is not a valid name; it is used in headers and labels: use letters, digits ` +
			`and ._:-`,
	} {
		if _, err := ParseAddedBackend([]byte(body)); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", body, err, want)
		}
	}
}

func FuzzBackendsFile(f *testing.F) {
	f.Add("http://a:8000\n")
	f.Add("- {url: http://b:8000}\n")
	f.Fuzz(func(t *testing.T, content string) {
		values, err := parseBackendsFile([]byte(content))
		if err != nil {
			return
		}
		if _, ok := values["backends"]; len(values) > 1 || len(values) == 1 && !ok {
			t.Errorf("%q: got %v", content, values)
		}
	})
}
