package vllm

import (
	"strconv"
	"testing"
)

func errorJSON(message string) string {
	return `{"error":{"message":` + strconv.Quote(message) + `,"type":"InternalServerError","code":500}}`
}

func TestIsShutdownError(t *testing.T) {
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
		if got := IsShutdownError([]byte(c.body)); got != c.want {
			t.Errorf("%s: %v, want %v", c.body, got, c.want)
		}
	}
}
