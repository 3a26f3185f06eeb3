package server

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

// standIn is a replica that does what no simulated one does. A path that is nil is
// served as by a healthy replica would.
type standIn struct {
	health, models, metrics, chat http.HandlerFunc
}

const wholeResponse = `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",` +
	`"content":"hi"},"finish_reason":"stop"}],` +
	`"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`

func (s standIn) handler() http.Handler {
	mux := http.NewServeMux()
	for path, f := range map[string]struct {
		serve    http.HandlerFunc
		response string
	}{
		"/health":              {s.health, ""},
		"/v1/models":           {s.models, `{"object":"list","data":[{"id":"m","object":"model","root":"m","max_model_len":131072}]}`},
		"/metrics":             {s.metrics, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"},
		"/v1/chat/completions": {s.chat, wholeResponse},
	} {
		if f.serve == nil {
			f.serve = func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, f.response)
			}
		}
		mux.HandleFunc(path, f.serve)
	}
	return mux
}

// start serves it over http and returns its URL.
func (s standIn) start(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(s.handler())
	t.Cleanup(func() {
		server.CloseClientConnections() // some of its handlers never end by themselves
		server.Close()
	})
	return server.URL
}

// fronted is a proxy with its default settings, but for what a test changes, in
// front of replicas of any kind.
type fronted struct {
	t      *testing.T
	server *Server
	url    string
	admin  string
	client *http.Client
	log    syncBuffer
}

func startFronted(t *testing.T, change func(*config.Config), urls ...string) *fronted {
	t.Helper()
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}
	f := &fronted{t: t, client: &http.Client{Transport: transport}}
	t.Cleanup(transport.CloseIdleConnections)
	f.server, _ = startServer(t, &f.log, change, urls...)
	f.url, f.admin = f.server.publicURL(), f.server.adminURL()
	return f
}

// until waits for something that must come, however slow the machine.
func (f *fronted) until(what string, reached func() bool) {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); !reached(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatalf("not within a minute: %s; the log:\n%s", what, f.log.String())
		}
	}
}

// ready waits until as many backends are.
func (f *fronted) ready(want int) {
	f.t.Helper()
	f.until(fmt.Sprint(want, " ready"), func() bool {
		n := 0
		for _, b := range f.server.registry.All() {
			if b.State() == backends.Ready {
				n++
			}
		}
		return n == want
	})
}

// logs waits until the log holds text.
func (f *fronted) logs(text string) {
	f.t.Helper()
	f.until("log of "+text, func() bool { return strings.Contains(f.log.String(), text) })
}

const plainChat = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`

// chat sends a chat and returns the whole response.
func (f *fronted) chat(body string) (*http.Response, string, error) {
	req, err := http.NewRequest(http.MethodPost, f.url+"/v1/chat/completions", bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

// checkServed sends a chat and fails the test unless a replica serves it whole.
func (f *fronted) checkServed() {
	f.t.Helper()
	if resp, text, err := f.chat(plainChat); err != nil || resp.StatusCode != http.StatusOK || text != wholeResponse {
		f.t.Errorf("text %v %.200q, error %v", resp, text, err)
	}
}
