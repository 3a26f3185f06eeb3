package proxy

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
)

// keyParameters are names of query parameters, in lower case, that clients put a key in.
var keyParameters = []string{
	"api_key", "api-key", "apikey", "x-api-key", "key", "token", "access_token", "auth", "authorization",
}

// removeClientKey deletes the headers that hold the client's key, and returns the query without it: a replica must not see a key
// that opens this proxy. Without configured keys any header may hold the same few letters by chance.
func (r *request) removeClientKey() (query string) {
	query = redactQuery(r.httpReq.URL.RawQuery, "")
	if r.account == nil {
		return query
	}
	for _, secret := range presentedSecrets(r.httpReq.Header, r.endpoint.Dialect()) {
		if len(secret) < apikey.MinKeyLength {
			continue
		}
		for name, values := range r.httpReq.Header {
			if slices.ContainsFunc(values, func(v string) bool { return strings.Contains(v, secret) }) {
				delete(r.httpReq.Header, name)
			}
		}
		query = redactQuery(query, secret)
	}
	return query
}

// redactQuery returns a query without the parameters that are keys by their name, or that hold secret if it is not empty.
func redactQuery(query, secret string) string {
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

// requestIDContainsKey reports whether a request's id, which is logged, contains a key of it.
func requestIDContainsKey(h http.Header, id string) bool {
	secrets := presentedSecrets(h, api.Anthropic)
	return slices.ContainsFunc(secrets[:], func(secret string) bool { return secret != "" && strings.Contains(id, secret) })
}
