package proxy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// errorJSON is an error of vLLM's.
func errorJSON(message string) string {
	text, _ := json.Marshal(message)
	return fmt.Sprintf(`{"error":{"message":%s,"type":"InternalServerError","param":null,"code":500}}`, text)
}

// An error that quotes its prompt must not look like the message of a replica that
// shuts down: the prompt could kill one replica after another.
func TestPoisonGuardIgnoresQuotedShutdownMessages(t *testing.T) {
	for name, body := range map[string]string{
		"word":             errorJSON("no template for 'what does shutdown do'"),
		"message":          errorJSON("no template for 'cannot schedule new futures after shutdown'"),
		"another field":    `{"error":{"message":"failed","param":"cannot schedule new futures after shutdown","code":500}}`,
		"embedded object":  `failed: {"error":{"message":"cannot schedule new futures after shutdown"}}`,
		"not an error":     `{"message":"cannot schedule new futures after shutdown"}`,
		"not a string":     `{"error":{"message":["cannot schedule new futures after shutdown"]}}`,
		"truncated object": `{"error":{"message":"cannot schedule new futures after shutdown"`,
	} {
		for _, stream := range []bool{false, true} {
			if stream && !strings.HasPrefix(body, `{"error":`) {
				continue // not an error event
			}
			t.Run(fmt.Sprint(name, " stream=", stream), func(t *testing.T) {
				ask, reply := askWhole, answered("500 Internal Server Error", body)
				if stream {
					ask, reply = askStream, streamed("data: "+body+"\n\n", doneLine)
				}
				script := func(m *mortal, s *session) {
					if _, ok := s.request(); ok {
						s.say(reply)
						time.Sleep(20 * time.Millisecond) // the reply is on its way before the process ends
						m.die()
					}
				}
				a, b := newMortal(script), newMortal(script)
				c := &replica{script: always(answered("200 OK", whole))}
				f := serveChecked(t, &a.replica, &b.replica, c)
				resp, _ := f.post("/v1/chat/completions", ask)
				if resp.StatusCode != 500 || len(c.requests()) != 0 {
					t.Errorf("got %d, and the third replica saw %d requests", resp.StatusCode, len(c.requests()))
				}
			})
		}
	}
}

// The messages with which vLLM refuses requests while it shuts down.
func TestShutdownMessages(t *testing.T) {
	for _, c := range []struct {
		body string
		want bool
	}{
		{errorJSON("cannot schedule new futures after shutdown"), true},
		{errorJSON("cannot schedule new futures after interpreter shutdown"), true},
		{errorJSON("Server shutting down"), true},
		{`{"type":"error","error":{"type":"internal_error","message":"cannot schedule new futures after shutdown"}}`, true},
		{errorJSON("EngineCore encountered an issue. See stack trace (above) for the root cause."), false},
		{errorJSON(""), false},
		{`{"error":"cannot schedule new futures after shutdown"}`, false},
		{"", false},
	} {
		if got := isShutdownError([]byte(c.body)); got != c.want {
			t.Errorf("%s: %v, want %v", c.body, got, c.want)
		}
	}
}
