package server

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"warmroute/config"
	"warmroute/fleet"
)

// A name that is registered by a pattern with a * may stand for an address of this machine, to which no connection is
// made: not for a check, a poll or an operator's action. One that a pattern names may.
func TestRegisteredNameOfLocalAddress(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		patterns []string
		address  string
		refused  bool
	}{
		"wildcard":                {[]string{"http://*.test:*"}, "127.0.0.1", true},
		"wildcard, any interface": {[]string{"http://*.test:*"}, "0.0.0.0", true},
		"named":                   {[]string{"http://*.test:*", "http://replica.test:*"}, "127.0.0.1", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			names := startNameServer(t, withAddresses(c.address))
			p := startRegistrable(t, func(s *config.Config) {
				s.DNS.Server, s.Registration.AllowURLs = names.address, c.patterns
			})
			var requests atomic.Int64
			handler := standIn{}.handler()
			replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				handler.ServeHTTP(w, r)
			}))
			t.Cleanup(replica.Close)
			u, _ := url.Parse(replica.URL)
			registered := "http://replica.test:" + u.Port()
			body := fmt.Sprintf(`{"url":%q}`, registered)
			if !c.refused {
				p.expect(http.StatusOK, "POST", "/workers", body)
				p.checkServed()
				return
			}
			p.registerWithoutWaiting(body)
			p.logs("state=down reason=\"/health: connect to " + c.address + ":" + u.Port() +
				": loopback and link-local addresses need an element without * in registration.allow_urls")
			p.expect(http.StatusOK, "GET", "/get_loads", "")
			p.call("POST", "/flush_cache", "")
			if n := requests.Load(); n > 0 {
				t.Errorf("%d requests to this machine", n)
			}
			b, err := config.ParseAddedBackend(fmt.Appendf(nil, `{"url":%q,"dns":"off"}`, registered))
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := p.server.fleet.Add(t.Context(), fleet.Registration{Backend: b, GivenURL: registered, Operator: true}); err != nil {
				t.Fatal(err)
			}
			p.ready(1) // an operator may
		})
	}
}

// registerWithoutWaiting registers a replica, and returns when it is listed. The call waits until the test ends.
func (p registrable) registerWithoutWaiting(body string) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/workers", strings.NewReader(body))
		if err != nil {
			p.t.Error(err)
			return
		}
		if resp, err := p.client.Do(req); err == nil {
			resp.Body.Close()
		}
	})
	p.t.Cleanup(func() {
		cancel()
		waiting.Wait()
	})
	p.until("it is listed", func() bool { return p.workers().Total == 1 })
}
