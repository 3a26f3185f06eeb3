package main

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/apikey"
)

// plainKey is a key as somebody may put it where it does not belong.
const plainKey = "sk-a-key-that-is-a-secret-0123456789"

const aHash = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func TestCheckReportsFaultsOfKeysAndShowsNone(t *testing.T) {
	hash := "sha256: " + aHash
	for _, c := range []struct{ name, yaml, file, want string }{
		{"a key in place of a section", "keys: [" + plainKey + "]", "", "keys[0]: wants a section with name and sha256, not text; a key in plain belongs into keys_file"},
		{"a map", "keys: {" + plainKey + ": {}}", "", `keys: wants a list, not a section with keys; begin each key with "- name:", or name a file in keys_file`},
		{"text", "keys: " + plainKey, "", `keys: wants a list, not text; begin each key with "- name:", or name a file in keys_file`},
		{"a key in place of a hash", "keys: [{name: a, sha256: " + plainKey + "}]", "",
			`keys[0].sha256: is no SHA-256: write the 64 digits that printf %s "$KEY" | sha256sum prints; a key in plain belongs into keys_file`},
		{"a key as a setting", "keys: [{" + plainKey + ": 1}]", "",
			"keys[0]: unknown setting; a key has name, sha256, models, requests_per_minute, tokens_per_minute, concurrency, priority, queue_time, route_headers, expires"},
		{"near a setting", "keys: [{name: a, modles: [m]}]", "", "keys[0]: unknown setting near models; did you mean that?"},
		{"a key with spaces as a name", "keys: [{name: \"" + plainKey + " x\", " + hash + "}]", "", "keys[0].name: cannot be one: " + apikey.NameRule},
		{"no name", "keys: [{" + hash + "}]", "", "keys[0].name: cannot be one: " + apikey.NameRule},
		{"no secret", "keys: [{name: a}]", "", "keys[0]: has no key; give it sha256, or name a file with it in keys_file"},
		{"no line in the file", "keys: [{name: a}]", "b " + plainKey, "keys[0]: has no key; give it sha256, or a line in KEYS"},
		{"one name twice", "keys: [{name: a, " + hash + "}, {name: a, sha256: " + strings.Repeat("b", 64) + "}]", "",
			"keys[1].name: is already the name of keys[0]; give one of the two another"},
		{"one key twice", "keys: [{name: a, " + hash + "}, {name: b, " + hash + "}]", "", "keys[1].sha256: is the same key as keys[0]; make another"},
		{"one key twice, in the file", "", "a " + plainKey + "\nb " + plainKey, "KEYS: line 2: is the same key as KEYS: line 1; make another"},
		{"no models", "keys: [{name: a, " + hash + ", models: []}]", "", "keys[0]: models is empty, so the key could do nothing; delete the line for all models"},
		{"models commented out", "keys: [{name: a, " + hash + ", models: }]", "", "keys[0]: models has no value; give it one or delete the line"},
		{"one model without brackets", "keys: [{name: a, " + hash + ", models: m}]", "", "keys[0]: models wants a list, not text"},
		{"a number for a model", "keys: [{name: a, " + hash + ", models: [7]}]", "", "keys[0].models[0]: wants text, not a number; put it in quotes"},
		{"a negative rate", "keys: [{name: a, " + hash + ", requests_per_minute: -1}]", "", "keys[0].requests_per_minute: -1 is too small; give it 0 or more"},
		{"a rate of few tokens", "keys: [{name: a, " + hash + ", tokens_per_minute: 10}]", "", "keys[0].tokens_per_minute: 10 is too small; give it 1000 or more"},
		{"a class out of range", "keys: [{name: a, " + hash + ", priority: 101}]", "", "keys[0].priority: 101 is too large; give it 100 or less"},
		{"a queue time of nothing", "keys: [{name: a, " + hash + ", queue_time: 1us}]", "", "keys[0].queue_time: 1µs is not between 1ms and 24h0m0s; drop it for routing.hold.time"},
		{"a queue time of days", "keys: [{name: a, " + hash + ", queue_time: 48h}]", "", "keys[0].queue_time: 48h0m0s is not between 1ms and 24h0m0s; drop it for routing.hold.time"},
		{"a queue time without a unit", "keys: [{name: a, " + hash + ", queue_time: 90}]", "", "keys[0].queue_time: 90 has no unit; write it like 250ms, 90s or 1m30s"},
		{"no time", "keys: [{name: a, " + hash + ", expires: soon}]", "", "keys[0].expires: is no time; write it like 2027-01-31 or 2027-01-31T18:00:00Z"},
		{"a number for a time", "keys: [{name: a, " + hash + ", expires: 7}]", "", "keys[0].expires: wants a time like 2027-01-31, not a number"},
		{"a line with no name", "", plainKey, "KEYS: line 1: write a name, a space and the key, nothing else"},
		{"a short key", "", "a short", "KEYS: line 1: the key has to be 20 or more visible ASCII characters, from a random source: openssl rand -hex 32"},
		{"an empty file", "", "# none\n", "keys_file: KEYS has no keys in it; add one, or drop the setting to let everybody in"},
		{"no file", "keys_file: none", "", "keys_file: stat none: no such file or directory"},
		{"a folder", "keys_file: /", "", "keys_file: / is no plain file"},
		{"unknown kind of tenants", "tenant: alone", "", `tenant: unknown value "alone"; use one of share, isolate`},
		{"a short token", "admin_token: secret", "", "admin_token: is shorter than 16 characters and could be guessed; make one with openssl rand -hex 32"},
		{"a token with a line end", "admin_token: \"" + plainKey + "\\n\"", "", "admin_token: has characters that no header may carry; was a line end copied with it?"},
		{"two tokens", "admin_token: " + plainKey + "\nadmin_token_file: none", "", "admin_token_file: admin_token is given as well; drop one of the two"},
		{"no token in the file", "admin_token_file: /dev/null", "", "admin_token_file: /dev/null is no plain file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			yaml := "backends: [\"http://a:8000\"]\n" + c.yaml
			if c.file != "" {
				file := filepath.Join(t.TempDir(), "keys")
				if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
					t.Fatal(err)
				}
				yaml += "\nkeys_file: " + file
				c.want = strings.ReplaceAll(c.want, "KEYS", file)
			}
			status, stdout, stderr := check(t, yaml)
			if status != 2 || stdout != "" || stderr != c.want+"\n" {
				t.Errorf("status %d, stdout %q, stderr\n%swant\n%s", status, stdout, stderr, c.want)
			}
			if strings.Contains(stderr, plainKey) {
				t.Error("the key is shown")
			}
		})
	}
}

func TestKeysComeFromTheListAndTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("a "+plainKey+"\nb "+plainKey+"2\na "+plainKey+"3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := mustLoad(t, `
backends: ["http://a:8000"]
keys_file: `+file+`
keys:
  - {name: a, sha256: "`+strings.ToUpper(aHash)+`  -", models: [m, org/n], requests_per_minute: 5, tokens_per_minute: 6000, concurrency: 7, priority: -8, queue_time: 12h, route_headers: true, expires: 2027-01-31}
  - {name: c, sha256: `+strings.Repeat("c", 64)+`, expires: "2027-01-31T18:00:00+01:00"}
`)
	hash := func(text string) apikey.Hash {
		h, err := apikey.ParseHash(text)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	want := []apikey.Key{
		{Name: "a", Hashes: []apikey.Hash{hash(aHash), apikey.HashOf(plainKey), apikey.HashOf(plainKey + "3")}, Models: []string{"m", "org/n"},
			RequestsPerMinute: 5, TokensPerMinute: 6000, Concurrency: 7, Priority: -8, QueueTime: 12 * time.Hour, RouteHeaders: true, Expires: time.Date(2027, 1, 31, 0, 0, 0, 0, time.UTC)},
		{Name: "c", Hashes: []apikey.Hash{hash(strings.Repeat("c", 64))}, Expires: time.Date(2027, 1, 31, 17, 0, 0, 0, time.UTC)},
		{Name: "b", Hashes: []apikey.Hash{apikey.HashOf(plainKey + "2")}},
	}
	got := c.apiKeys()
	for i := range got {
		got[i].Expires = got[i].Expires.UTC()
		if got[i].Expires.IsZero() {
			got[i].Expires = time.Time{}
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestKeysAreNoVariable(t *testing.T) {
	t.Setenv("WARMROUTE_KEYS", plainKey)
	status, _, stderr := check(t, "", "http://a:8000")
	if status != 2 || !strings.HasPrefix(stderr, "keys (from WARMROUTE_KEYS): wants a list, not text") || strings.Contains(stderr, plainKey) {
		t.Errorf("status %d, %s", status, stderr)
	}
}

func TestTheAdminTokenMayComeFromAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(plainKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WARMROUTE_ADMIN_TOKEN_FILE", file)
	if c := mustLoad(t, "", "http://a:8000"); c.AdminToken != plainKey {
		t.Error("the token is not what the file has")
	}
	t.Setenv("WARMROUTE_ADMIN", ":9090")
	if w := mustLoad(t, "", "http://a:8000").Warnings(); slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "until admin_token is set") }) {
		t.Errorf("a warning of no token where one is set: %q", w)
	}
}

func TestCheckSaysHowManyKeysThereAre(t *testing.T) {
	status, stdout, stderr := check(t, "backends: [\"http://a:8000\"]\nkeys: [{name: a, sha256: "+aHash+"}]")
	if want := "ok: 1 backends, policy prefix, listen :8080, 1 keys\n"; status != 0 || stdout != want || stderr != "" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
}
