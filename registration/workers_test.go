package registration

import (
	"encoding/json"
	"strings"
	"testing"

	"warmroute/backends"
)

func TestParseWorker(t *testing.T) {
	for _, c := range []struct{ body, url, device, err string }{
		{`{"url":"http://a:1","worker_type":"regular"}`, "http://a:1", "", ""},
		{`{"url":"http://a:1","device":"gpu0"}`, "http://a:1", "gpu0", ""},
		{`{"url":"http://a:1","device":0}`, "", "", "not a JSON object"},
		{`{"url":"http://a:1/"}`, "http://a:1/", "", ""},
		{`{"url":"http://a:1","worker_type":"","api_key":null,"bootstrap_port":null,"labels":{"x":[1]},"new":true}`, "http://a:1", "", ""},
		{`{"worker_type":"regular"}`, "", "", ""},
		{`{"url":"http://a:1","worker_type":"prefill","bootstrap_port":8998}`, "", "", "not supported yet"},
		{`{"url":"http://a:1","worker_type":"decode"}`, "", "", "not supported yet"},
		{`{"url":"http://a:1","worker_type":"encode"}`, "", "", "not supported yet"},
		{`{"url":"http://a:1","api_key":"k"}`, "", "", "backends_file"},
		{`{"url":5}`, "", "", "not a JSON object"},
		{`["http://a:1"]`, "", "", "not a JSON object"},
		{``, "", "", "not a JSON object"},
		{`{"url":"http://a:1"} {}`, "", "", "not a JSON object"},
	} {
		given, device, err := parseWorker([]byte(c.body))
		if given != c.url || device != c.device || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %q, %q, %v", c.body, given, device, err)
		}
	}
}

// FuzzParseWorker asserts that what is read is a string of the body.
func FuzzParseWorker(f *testing.F) {
	f.Add([]byte(`{"url":"http://a:1","worker_type":"regular"}`))
	f.Add([]byte(`{"URL":"\u0000","api_key":""}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		given, device, err := parseWorker(body)
		if err != nil && given+device != "" {
			t.Errorf("%q and %q beside %v", given, device, err)
		}
		if !json.Valid(body) && err == nil {
			t.Errorf("%q was read", body)
		}
		if u, err := backends.ParseURL(given); err == nil && u.User != nil {
			t.Errorf("%q has a user", given)
		}
	})
}

func TestFindRoutes(t *testing.T) {
	for _, c := range []struct {
		path, methods, worker string
	}{
		{"/workers", "GET POST", ""},
		{"/workers/", "GET POST", ""},
		{"/workers/10.0.0.5:8000", "GET DELETE", "10.0.0.5:8000"},
		{"/workers/http%3A%2F%2F10.0.0.5%3A8000", "GET DELETE", "http://10.0.0.5:8000"},
		{"/workers/http%3A%2F%2F10.0.0.5%3A8000%2F", "GET DELETE", "http://10.0.0.5:8000/"},
		{"/workers/http://10.0.0.5:8000", "GET DELETE", "http://10.0.0.5:8000"},
		{"/workers/%zz", "", ""},
		{"/add_worker", "POST", ""},
		{"/get_loads/", "GET", ""},
		{"/workersx", "", ""},
		{"/v1/models", "", ""},
		{"//workers", "", ""},
		{"/%77orkers", "", ""},
	} {
		routes, worker := findRoutes(c.path)
		var methods []string
		for _, one := range routes {
			methods = append(methods, one.method)
		}
		if got := strings.Join(methods, " "); got != c.methods || worker != c.worker {
			t.Errorf("%s: got %s, %q; want %s, %q", c.path, got, worker, c.methods, c.worker)
		}
	}
}
