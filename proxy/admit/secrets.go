package admit

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/httpheader"
)

// keyParameters are names of query parameters, in lower case, that clients put a key in.
var keyParameters = []string{
	"api_key", "api-key", "apikey", "x-api-key", "key", "token", "access_token", "auth", "authorization",
}

// RedactQuery returns a query without the parameters that are keys by their name, or that hold secret if it is not empty.
func RedactQuery(query, secret string) string {
	if query == "" {
		return ""
	}
	kept := make([]string, 0, 4)
	for pair := range strings.SplitSeq(query, "&") {
		name, _, _ := strings.Cut(pair, "=")
		plain, err := url.QueryUnescape(name)
		if err == nil && slices.Contains(keyParameters, strings.ToLower(strings.TrimSpace(plain))) {
			continue
		}
		if secret != "" {
			// What cannot be unescaped here may be there.
			if plain, err = url.QueryUnescape(pair); err != nil || strings.Contains(plain, secret) {
				continue
			}
		}
		kept = append(kept, pair)
	}
	return strings.Join(kept, "&")
}

// IDContainsSecret reports whether a request's id, which is logged, contains a key of it.
func IDContainsSecret(h http.Header, id string) bool {
	secrets := PresentedSecrets(h, api.Anthropic)
	return slices.ContainsFunc(secrets[:], func(secret string) bool { return secret != "" && strings.Contains(id, secret) })
}

// PresentedSecrets returns the secrets that a request came with, "" for none. The first that is a valid key counts.
// Anthropic's clients send a key in X-Api-Key, some of them beside a token of their own.
func PresentedSecrets(h http.Header, d api.Dialect) (secrets [2]string) {
	secrets[0] = apikey.Bearer(h)
	if d == api.Anthropic {
		secrets[1] = apikey.XAPIKey(h)
	}
	return secrets
}

// KeyFingerprint returns a hash of the API key of a request, where keys are not configured; 0: none.
func KeyFingerprint(h http.Header) uint64 {
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if key := httpheader.First(h, name); key != "" {
			return NonzeroHash(xxh3.HashString(key))
		}
	}
	return 0
}

// NonzeroHash maps 0, which means none, to another hash.
func NonzeroHash(hash uint64) uint64 { return max(hash, 1) }
