package config

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

// plainKey is a plain-text key, for settings that must not contain one.
const plainKey = "sk-a-key-that-is-a-secret-0123456789"

const aHash = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func TestKeyErrorsHideKeys(t *testing.T) {
	hash := "sha256: " + aHash
	for _, c := range []struct{ name, yaml, file, want string }{
		{"key as a list element", "keys: [" + plainKey + "]", "",
			"keys[0]: expected a mapping with name and sha256, got a string; plain keys belong in keys_file"},
		{"mapping", "keys: {" + plainKey + ": {}}", "",
			`keys: expected a list, got a mapping; begin each key with "- name:", or name a file in keys_file`},
		{"string", "keys: " + plainKey, "", `keys: expected a list, got a string; begin each key with "- name:", or name a file in keys_file`},
		{"key as a hash", "keys: [{name: a, sha256: " + plainKey + "}]", "",
			`keys[0].sha256: not a SHA-256 hash: use the 64 digits that printf %s "$KEY" | sha256sum prints; plain keys belong in keys_file`},
		{"key as a setting", "keys: [{" + plainKey + ": 1}]", "",
			"keys[0]: unknown setting; a key has name, models, requests_per_minute, tokens_per_minute, tokenize_bytes_per_minute, concurrency, " +
				"priority, queue_time, slo_ttft, route_headers, expires, sha256"},
		{"misspelled setting", "keys: [{name: a, modles: [m]}]", "", `keys[0]: unknown setting "modles"; did you mean models?`},
		{"unknown setting", "keys: [{name: a, value: 1}]", "",
			`keys[0]: unknown setting "value"; a key has name, models, requests_per_minute, tokens_per_minute, tokenize_bytes_per_minute, ` +
				`concurrency, priority, queue_time, slo_ttft, route_headers, expires, sha256`},
		{"key as a name", "keys: [{name: \"" + plainKey + " x\", " + hash + "}]", "", "keys[0].name: is not a valid name: " + apikey.NameRule},
		{"no name", "keys: [{" + hash + "}]", "", "keys[0].name: is not a valid name: " + apikey.NameRule},
		{"no key", "keys: [{name: a}]", "", "keys[0]: has no key; set sha256, or set keys_file and add a line for it there"},
		{"no line in the file", "keys: [{name: a}]", "b " + plainKey, "keys[0]: has no key; set sha256, or add a line for it to KEYS"},
		{"one name with two limits", "keys: [{name: a, " + hash + ", models: [m], concurrency: 3}, {name: b, sha256: " + strings.Repeat("c", 64) +
			"}, {name: a, sha256: " + strings.Repeat("b", 64) + ", models: [m], priority: 3, expires: 2027-01-31}]", "",
			"keys[2]: has the name of keys[0], so both are one key, but they differ in concurrency, priority, expires; give both the same " +
				"values, or rename one"},
		{"one name twice, without a key", "keys: [{name: a, " + hash + "}, {name: a}]", "a " + plainKey,
			"keys[1]: has no key; set sha256, or add a line for it to KEYS"},
		{"duplicate key", "keys: [{name: a, " + hash + "}, {name: b, " + hash + "}]", "",
			"keys[1].sha256: is the same key as keys[0]; create another one"},
		{"duplicate key in the file", "", "a " + plainKey + "\nb " + plainKey,
			"KEYS: line 2: is the same key as KEYS: line 1; create another one"},
		{"no models", "keys: [{name: a, " + hash + ", models: []}]", "",
			"keys[0]: models is empty, which allows none; delete the line to allow all models"},
		{"null models", "keys: [{name: a, " + hash + ", models: }]", "", "keys[0]: models has no value; give it one or delete the line"},
		{"models as a string", "keys: [{name: a, " + hash + ", models: m}]", "", "keys[0]: models: expected a list, got a string"},
		{"number for a model", "keys: [{name: a, " + hash + ", models: [7]}]", "",
			"keys[0].models[0]: expected a string, got a number; put it in quotes"},
		{"negative rate", "keys: [{name: a, " + hash + ", requests_per_minute: -1}]", "",
			"keys[0].requests_per_minute: -1 is too small; the minimum is 0"},
		{"small token rate", "keys: [{name: a, " + hash + ", tokens_per_minute: 10}]", "",
			"keys[0].tokens_per_minute: 10 is too small; the minimum is 1000"},
		{"priority out of range", "keys: [{name: a, " + hash + ", priority: 101}]", "", "keys[0].priority: 101 is too large; the maximum is 100"},
		{"short queue time", "keys: [{name: a, " + hash + ", queue_time: 1us}]", "",
			"keys[0].queue_time: 1µs is not between 1ms and 24h0m0s; remove it to use routing.queue.none_ready_timeout and .busy_timeout"},
		{"long queue time", "keys: [{name: a, " + hash + ", queue_time: 48h}]", "",
			"keys[0].queue_time: 48h0m0s is not between 1ms and 24h0m0s; remove it to use routing.queue.none_ready_timeout and .busy_timeout"},
		{"queue time without unit", "keys: [{name: a, " + hash + ", queue_time: 90}]", "",
			"keys[0].queue_time: 90 has no unit; write a duration such as 250ms, 90s or 1m30s"},
		{"invalid date", "keys: [{name: a, " + hash + ", expires: soon}]", "",
			"keys[0].expires: is not a date or time such as 2027-01-31 or 2027-01-31T18:00:00Z"},
		{"number for a date", "keys: [{name: a, " + hash + ", expires: 7}]", "",
			"keys[0].expires: expected a date such as 2027-01-31, got a number"},
		{"line without name", "", plainKey, "KEYS: line 1: expected a name, a space and a key"},
		{"short key", "", "a short",
			"KEYS: line 1: the key must have at least 20 visible ASCII characters; create one with openssl rand -hex 32"},
		{"empty file", "", "# none\n", "keys_file: KEYS contains no keys; add one, or remove the setting to allow access without a key"},
		{"missing file", "keys_file: none", "", "keys_file: stat none: no such file or directory"},
		{"directory", "keys_file: /", "", "keys_file: / is not a regular file"},
		{"unknown tenant mode", "tenant: alone", "", `tenant: unknown tenant "alone"; choose one of share, isolate`},
		{"short token", "admin_token: secret", "",
			"admin_token: is shorter than 16 characters and could be guessed; create one with openssl rand -hex 32"},
		{"token with a line break", "admin_token: \"" + plainKey + "\\n\"", "",
			"admin_token: contains characters that are not allowed in a header; does it end with a line break?"},
		{"two tokens", "admin_token: " + plainKey + "\nadmin_token_file: none", "",
			"admin_token_file: admin_token is given as well; remove one of the two"},
		{"token file is a device", "admin_token_file: /dev/null", "", "admin_token_file: /dev/null is not a regular file"},
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
			got := loadErrors(t, yaml)
			if got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
			if strings.Contains(got, plainKey) {
				t.Error("the key is shown")
			}
		})
	}
}

func TestKeysFromListAndFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("a "+plainKey+"\nb "+plainKey+"2\na "+plainKey+"3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := mustLoad(t, `
backends: ["http://a:8000"]
keys_file: `+file+`
keys:
  - {name: a, sha256: "`+strings.ToUpper(aHash)+`  -", models: [m, org/n], requests_per_minute: 5, tokens_per_minute: 6000, `+
		`tokenize_bytes_per_minute: 9000, concurrency: 7, priority: -8, queue_time: 12h, slo_ttft: 3s, route_headers: true, expires: 2027-01-31}
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
			RequestsPerMinute: 5, TokensPerMinute: 6000, TokenizeBytesPerMinute: 9000, Concurrency: 7, Priority: -8, QueueTime: 12 * time.Hour,
			SLOTTFT: 3 * time.Second, RouteHeaders: true, Expires: time.Date(2027, 1, 31, 0, 0, 0, 0, time.UTC)},
		{Name: "c", Hashes: []apikey.Hash{hash(strings.Repeat("c", 64))}, Expires: time.Date(2027, 1, 31, 17, 0, 0, 0, time.UTC)},
		{Name: "b", Hashes: []apikey.Hash{apikey.HashOf(plainKey + "2")}},
	}
	got := c.APIKeys()
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

// Entries of one name are one key, in the list as in the file.
func TestKeyRotation(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("a "+plainKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	limits := "models: [m], requests_per_minute: 5, expires: 2027-01-31"
	c := mustLoad(t, `
backends: ["http://a:8000"]
keys_file: `+file+`
keys:
  - {name: a, sha256: `+aHash+`, `+limits+`}
  - {name: b, sha256: `+strings.Repeat("c", 64)+`}
  - {name: a, sha256: `+strings.Repeat("b", 64)+`, `+limits+`}
`)
	got := c.APIKeys()
	if len(got) != 2 || got[0].Name != "a" || len(got[0].Hashes) != 3 || got[0].RequestsPerMinute != 5 || got[1].Name != "b" ||
		len(got[1].Hashes) != 1 {
		t.Errorf("got %+v", got)
	}
	keys := apikey.New(got)
	old, _ := keys.Find(plainKey)
	if old == nil || len(keys.Usage()) != 2 {
		t.Errorf("%+v, usage %+v", old, keys.Usage())
	}
}

func TestKeysNotInEnvironment(t *testing.T) {
	t.Setenv("WARMROUTE_KEYS", plainKey)
	got := loadErrors(t, "", "http://a:8000")
	if !strings.HasPrefix(got, "keys (from WARMROUTE_KEYS): expected a list, got a string") || strings.Contains(got, plainKey) {
		t.Error(got)
	}
}

func TestAdminTokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(plainKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WARMROUTE_ADMIN_TOKEN_FILE", file)
	if c := mustLoad(t, "", "http://a:8000"); c.AdminToken != plainKey {
		t.Error("the token is not what the file has")
	}
	t.Setenv("WARMROUTE_ADMIN", ":9090")
	if w := mustLoad(t, "", "http://a:8000").Warnings(testLoader.Policies); slices.ContainsFunc(w, func(s string) bool {
		return strings.Contains(s, "until admin_token is set")
	}) {
		t.Errorf("a warning of no token where one is set: %q", w)
	}
}
