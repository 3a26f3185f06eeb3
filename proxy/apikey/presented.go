package apikey

import (
	"net/http"
	"strings"
)

// longestKey bounds what is hashed of what a client presents.
const longestKey = 4 << 10

// Presented returns the key that a request came with: as a Bearer token, or, where
// anthropic is set, in the header that Anthropic's clients use. "" when it came
// with none, or with more than one of a kind, which readers could take differently.
func Presented(h http.Header, anthropic bool) string {
	given := h["Authorization"]
	if len(given) == 0 && anthropic {
		if given = h["X-Api-Key"]; len(given) == 1 && len(given[0]) <= longestKey {
			return given[0]
		}
		return ""
	}
	if len(given) != 1 || len(given[0]) > longestKey {
		return ""
	}
	scheme, key, _ := strings.Cut(given[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.Trim(key, " ")
}
