package registration

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/config"
)

func TestParseWorker(t *testing.T) {
	for _, c := range []struct {
		body string
		want givenWorker
		err  string
	}{
		{`{"url":"http://a:1","worker_type":"regular"}`, givenWorker{url: "http://a:1"}, ""},
		{`{"url":"http://a:1","device":"gpu0"}`, givenWorker{url: "http://a:1", device: "gpu0"}, ""},
		{`{"url":"http://a:1","device":0}`, givenWorker{}, "not a JSON object"},
		{`{"url":"http://a:1/"}`, givenWorker{url: "http://a:1/"}, ""},
		{`{"url":"http://a:1","worker_type":"","api_key":null,"bootstrap_port":null,"labels":{"x":[1]},"new":true}`,
			givenWorker{url: "http://a:1"}, ""},
		{`{"worker_type":"regular"}`, givenWorker{}, ""},
		{`{"url":"http://a:1","worker_type":"prefill","bootstrap_port":8998}`, givenWorker{url: "http://a:1", role: backends.RolePrefill}, ""},
		{`{"url":"http://a:1","worker_type":"decode"}`, givenWorker{url: "http://a:1", role: backends.RoleDecode}, ""},
		{`{"url":"http://a:1","worker_type":"encode"}`, givenWorker{}, `unknown worker_type "encode"`},
		{`{"url":"http://a:1","worker_type":"both"}`, givenWorker{}, `unknown worker_type "both"`},
		{`{"url":"http://a:1","api_key":"k"}`, givenWorker{}, "backends_file"},
		{`{"url":5}`, givenWorker{}, "not a JSON object"},
		{`["http://a:1"]`, givenWorker{}, "not a JSON object"},
		{``, givenWorker{}, "not a JSON object"},
		{`{"url":"http://a:1"} {}`, givenWorker{}, "not a JSON object"},
	} {
		got, err := parseWorker([]byte(c.body))
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %+v, %v", c.body, got, err)
		}
	}
}

// FuzzParseWorker asserts that what is read is a string of the body.
func FuzzParseWorker(f *testing.F) {
	f.Add([]byte(`{"url":"http://a:1","worker_type":"regular"}`))
	f.Add([]byte(`{"url":"http://a:1","worker_type":"prefill","bootstrap_port":8998}`))
	f.Add([]byte(`{"URL":"\u0000","api_key":""}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		given, err := parseWorker(body)
		if err != nil && given != (givenWorker{}) {
			t.Errorf("%+v beside %v", given, err)
		}
		if !json.Valid(body) && err == nil {
			t.Errorf("%q was read", body)
		}
		if u, err := backends.ParseURL(given.url); err == nil && u.User != nil {
			t.Errorf("%+v has a user", given)
		}
	})
}

func TestRoutes(t *testing.T) {
	h := &Handler{}
	s := h.newSettings(&config.Config{})
	for _, c := range []struct {
		path, allowed string
		worker        string // as written
	}{
		{"/workers", "GET POST", ""},
		{"/workers/", "GET POST", ""},
		{"/workers/10.0.0.5:8000", "GET DELETE", "10.0.0.5:8000"},
		{"/workers/http%3A%2F%2F10.0.0.5%3A8000", "GET DELETE", "http%3A%2F%2F10.0.0.5%3A8000"},
		{"/workers/http%3A%2F%2F10.0.0.5%3A8000%2F", "GET DELETE", "http%3A%2F%2F10.0.0.5%3A8000%2F"},
		{"/workers/http://10.0.0.5:8000", "GET DELETE", "http://10.0.0.5:8000"},
		{"/workers/http://10.0.0.5:8000/", "GET DELETE", "http://10.0.0.5:8000/"},
		{"/workers//", "GET DELETE", "/"},
		{"/add_worker", "POST", ""},
		{"/get_loads/", "GET", ""},
		{"/get_loads//", "", ""},
		{"/workersx", "", ""},
		{"/v1/models", "", ""},
		{"//workers", "", ""},
		{"/%77orkers", "", ""},
		{"/", "", ""},
	} {
		u, err := url.ParseRequestURI(c.path)
		if err != nil {
			t.Fatal(err)
		}
		pattern, worker := s.paths.Lookup(http.MethodGet, routePath(u))
		allowed := strings.ReplaceAll(s.calls.AllowedMethods(routePath(u)), ",", "")
		if allowed != c.allowed || worker != c.worker || (pattern != "") != (allowed != "") {
			t.Errorf("%s: got pattern %q, %s, %q; want %s, %q", c.path, pattern, allowed, worker, c.allowed, c.worker)
		}
	}
}
