package apikey

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

const plain = "a-key-of-more-than-twenty-characters"

func TestParseFile(t *testing.T) {
	hash := HashOf("other")
	data := "# who has which\n\nteam-a: " + plain + "\n  team-b\tsha256:" + hex.EncodeToString(hash[:]) + "  \r\nteam-a " + plain + "2"
	secrets, errs := ParseFile(data)
	want := []Secret{{"team-a", HashOf(plain), 3}, {"team-b", hash, 4}, {"team-a", HashOf(plain + "2"), 5}}
	if fmt.Sprint(secrets) != fmt.Sprint(want) || len(errs) != 0 {
		t.Errorf("got %v, %v, want %v", secrets, errs, want)
	}
}

func TestParseFileErrors(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{plain, "line 2: expected a name, a space and a key"},
		{"team-a " + plain + " " + plain, "line 2: expected a name"},
		{"team\"a " + plain, "line 2: invalid name"},
		{"team-a hidden", "line 2: the key must have at least 20"},
		{"team-a " + plain + "ä", "line 2: the key must have at least 20 visible ASCII"},
		{"team-a sha256:hidden", "line 2: not a SHA-256 hash"},
		{"team-a sha256:" + strings.Repeat("0", 63), "line 2: not a SHA-256 hash"},
		{"team-a sha256:" + strings.Repeat("0", 66), "line 2: not a SHA-256 hash"},
		{"team-a sha256:" + strings.Repeat("g", 64), "line 2: not a SHA-256 hash"},
	} {
		_, errs := ParseFile("# one\n" + c.line + "\n")
		if len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), c.want) || strings.Contains(errs[0].Error(), "hidden") ||
			strings.Contains(errs[0].Error(), plain) {
			t.Errorf("%s: got %v, want %s", c.line, errs, c.want)
		}
	}
}

func TestSecretsOfHeader(t *testing.T) {
	f := func(bearer, apiKey string, lines ...string) {
		t.Helper()
		h := http.Header{}
		for i := 0; i < len(lines); i += 2 {
			h.Add(lines[i], lines[i+1])
		}
		if got := Bearer(h); got != bearer {
			t.Errorf("%q: the token is %q, want %q", lines, got, bearer)
		}
		if got := XAPIKey(h); got != apiKey {
			t.Errorf("%q: the key is %q, want %q", lines, got, apiKey)
		}
	}
	f("", "")
	f("k", "", "Authorization", "Bearer k")
	f("k", "", "authorization", "bEARER   k ")
	f("", "", "Authorization", "k")
	f("", "", "Authorization", "Bearer")
	f("", "", "Authorization", "Basic aGk6aw==")
	f("", "", "Authorization", "Bearer\tk")
	f("", "", "Authorization", "Bearer k", "Authorization", "Bearer l")
	f("", "", "Authorization", "Bearer "+strings.Repeat("k", maxSecretBytes))
	f("", "k", "X-Api-Key", "k")
	f("", "", "X-Api-Key", "k", "X-Api-Key", "l")
	f("", "", "X-Api-Key", strings.Repeat("k", maxSecretBytes+1))
	f("k", "l", "X-Api-Key", "l", "Authorization", "Bearer k")
	f("", "l", "X-Api-Key", "l", "Authorization", "Basic k")
}

func FuzzParseFile(f *testing.F) {
	f.Add("team-a " + plain + "\n# x\n\nb sha256:" + strings.Repeat("0f", 32))
	f.Add("a\x00b \xff\r\nc sha256: \u2028 x")
	f.Fuzz(func(t *testing.T, data string) {
		secrets, errs := ParseFile(data)
		if n := strings.Count(data, "\n") + 1; len(secrets)+len(errs) > n {
			t.Fatalf("%d secrets and %d errs in %d lines", len(secrets), len(errs), n)
		}
		for _, s := range secrets {
			line := strings.Split(data, "\n")[s.Line-1]
			if !IsValidName(s.Name) || !strings.HasPrefix(strings.TrimSpace(line), s.Name) {
				t.Fatalf("line %q has the name %q", line, s.Name)
			}
		}
		for _, err := range errs {
			for _, word := range strings.Fields(data) {
				if len(word) >= MinKeyLength && strings.Contains(err.Error(), word) {
					t.Fatalf("%v shows %q", err, word)
				}
			}
		}
	})
}

func FuzzBearer(f *testing.F) {
	f.Add("Bearer k")
	f.Add("")
	f.Add("bearer  \x00")
	f.Fuzz(func(t *testing.T, authorization string) {
		got := Bearer(http.Header{"Authorization": {authorization}})
		if len(got) > maxSecretBytes || !strings.HasSuffix(strings.TrimRight(authorization, " "), got) {
			t.Fatalf("%q presents %q", authorization, got)
		}
	})
}
