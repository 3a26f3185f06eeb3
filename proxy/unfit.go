package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"warmroute/metrics"
)

// unfit is for answers that no engine gives, so something else answers in its
// place: they are no use to the client, and another backend may do better. It
// returns nil for every other.
func unfit(resp *http.Response) *failure {
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		// Not followed: the body would go, with the backend's key, to wherever the
		// answer says. Not relayed: the client would go there past the proxy.
		return &failure{reason: metrics.RetryRedirect, err: fmt.Errorf("it redirects (%d) to %s; give the backend the URL of the replica itself", resp.StatusCode, place(resp.Header.Get("Location")))}
	case resp.StatusCode == http.StatusLoopDetected:
		return &failure{reason: metrics.RetryLoop, err: errors.New("it answered 508: the backend leads back to this proxy; remove it from the backends"), loop: true}
	case isEventStream(resp.Header) && isEncoded(resp.Header):
		// Neither its first event nor an error in it could be seen.
		return &failure{reason: metrics.RetryEncoded, err: errors.New("its stream is encoded, though nothing but identity was asked for; turn compression off in front of the replica")}
	}
	return nil
}

// place is where a redirect leads, without the path and the query: they may hold
// what was asked.
func place(location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host == "" {
		return "another path"
	}
	return u.Scheme + "://" + u.Host
}

// isEncoded reports whether a body has to be decoded to be read, as a compressed one.
func isEncoded(h http.Header) bool {
	coding := first(h, "Content-Encoding")
	return coding != "" && !strings.EqualFold(coding, "identity")
}
