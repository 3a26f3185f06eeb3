package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestStress(t *testing.T) {
	respond := func(w http.ResponseWriter, r *http.Request, id string) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), `"stream":true`) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"id\":\"chatcmpl-%s-x\",\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"length\"}]}\n\ndata: "+
				"[DONE]\n\n", id)
			return
		}
		fmt.Fprintf(w, `{"id":"chatcmpl-%s-x","choices":[{"finish_reason":"length"}]}`, id)
	}
	for name, c := range map[string]struct {
		handle      http.HandlerFunc
		hangTimeout time.Duration
		hangs       bool
		fails       bool
	}{
		"complete": {func(w http.ResponseWriter, r *http.Request) {
			respond(w, r, r.Header.Get("X-Request-Id"))
		}, time.Minute, false, false},
		"of another request": {func(w http.ResponseWriter, r *http.Request) { respond(w, r, "stress-0") }, time.Minute, false, true},
		"truncated": {func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, `{"id":"chatcmpl-%s-x"`, r.Header.Get("X-Request-Id"))
		}, time.Minute, false, true},
		"never": {func(_ http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}, 60 * time.Millisecond, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(c.handle)
			defer server.Close()
			s := &stress{verdict: newVerdict(nil), url: server.URL, requests: 200, hangTimeout: c.hangTimeout}
			hung := s.runUntilHang(t.Context())
			s.end()
			if hung != c.hangs || (s.verdict.violationCount > 0) != c.fails {
				t.Errorf("hung %v, violations %q", hung, s.verdict.violations)
			}
			if n := int64(s.verdict.sent) + s.disconnected.Load(); !c.hangs && n != 200 {
				t.Errorf("%d of 200 requests ended", n)
			}
		})
	}
}
