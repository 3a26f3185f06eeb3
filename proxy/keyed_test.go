package proxy

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/apikey"
)

// secretOf is the key of that name, as long as keys are.
func secretOf(name string) string { return "the-secret-of-" + name + "-0123456789" }

func keyOf(name string, change func(*apikey.Key)) apikey.Key {
	k := apikey.Key{Name: name, Hashes: []apikey.Hash{apikey.HashOf(secretOf(name))}}
	if change != nil {
		change(&k)
	}
	return k
}

// withKeys is an option of serve.
func withKeys(list ...apikey.Key) func(*Options) {
	return func(o *Options) { o.Keys = apikey.New(list) }
}

func bearer(name string) []string { return []string{"Authorization", "Bearer " + secretOf(name)} }

func TestWithoutAValidKeyNothingIsAnswered(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("a", nil), keyOf("late", func(k *apikey.Key) { k.Expires = time.Now().Add(-time.Hour) })), r)
	for _, c := range []struct {
		name   string
		path   string
		header []string
		status int
		says   string
	}{
		{"none", "/v1/chat/completions", nil, 401, "Authorization: Bearer KEY"},
		{"unknown", "/v1/chat/completions", bearer("b"), 401, "not known"},
		{"expired", "/v1/chat/completions", bearer("late"), 401, "expired"},
		{"its hash", "/v1/chat/completions", []string{"Authorization", fmt.Sprintf("Bearer %x", apikey.HashOf(secretOf("a")))}, 401, "not known"},
		{"a password", "/v1/chat/completions", []string{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte(":"+secretOf("a")))}, 401, "Bearer"},
		{"Anthropic's header elsewhere", "/v1/chat/completions", []string{"X-Api-Key", secretOf("a")}, 401, "Bearer"},
		{"valid", "/v1/chat/completions", bearer("a"), 200, "Hello"},
		{"Anthropic's header", "/v1/messages", []string{"X-Api-Key", secretOf("a")}, 200, "Hello"},
		{"a token for Anthropic's path", "/v1/messages", bearer("a"), 200, "Hello"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, answer := f.post(c.path, askWhole, c.header...)
			if resp.StatusCode != c.status || !strings.Contains(answer, c.says) {
				t.Fatalf("got %d %s", resp.StatusCode, answer)
			}
			if c.status == 200 {
				return
			}
			if e := refused(t, answer); *e.Error.Code != "invalid_api_key" || resp.Header.Get("Www-Authenticate") != "Bearer" || strings.Contains(answer, "the-secret") {
				t.Errorf("got %v %s", resp.Header, answer)
			}
		})
	}
	if n := len(r.requests()); n != 3 {
		t.Errorf("the replica saw %d requests, want 3", n)
	}
	for path, status := range map[string]int{
		"/livez": 200, "/readyz": 200, "/health": 200, "/v1/models": 401, "/v1/models/m": 401, "/version": 401, "/none": 404,
	} {
		if resp, _ := f.get(path); resp.StatusCode != status {
			t.Errorf("%s: got %d, want %d", path, resp.StatusCode, status)
		}
	}
	f.counts(`warmroute_unauthorized_total{reason="expired"} 1`)
	f.counts(`warmroute_unauthorized_total{reason="unknown"} 2`)
	f.counts(`warmroute_key_requests_total{key="a"} 3`)
}

func TestAWrongKeyIsRefusedBeforeTheBodyIsRead(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", nil)), &replica{})
	resp, _ := f.raw("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 100000\r\n\r\n")
	if resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("got %d", resp.StatusCode)
	}
}

func TestWithoutKeysEverybodyMayComeIn(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for _, header := range [][]string{nil, bearer("a"), {"Authorization", "nonsense"}} {
		if resp, answer := f.post("/v1/chat/completions", askWhole, header...); resp.StatusCode != 200 || resp.Header.Get("X-Warmroute-Backend") == "" {
			t.Errorf("%q: got %d %s", header, resp.StatusCode, answer)
		}
	}
	if strings.Contains(f.exposition(), "warmroute_key_") {
		t.Error("metrics of keys without any")
	}
}
