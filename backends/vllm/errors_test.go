package vllm

import (
	"net/http"
	"strconv"
	"strings"
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

func TestIsScalingError(t *testing.T) {
	for body, want := range map[string]bool{
		`{"error":"The model is currently scaling. Please try again later."}`:             true,
		`{"error": "This engine (rank 3) has been retired and is awaiting shutdown."}`:    true,
		`{"error":{"message":"The model is currently scaling. Please try again later."}}`: false,
		`{"error":"overloaded"}`: false,
		`{"detail":"The model is currently scaling. Please try again later."}`:         false,
		`x {"error":"The model is currently scaling. Please try again later."}`:        false,
		`{"error":"The model is currently scaling` + strings.Repeat(" ", 1<<10) + `"}`: false,
		``: false,
	} {
		if got := IsScalingError(http.StatusServiceUnavailable, []byte(body)); got != want {
			t.Errorf("%s: %v", body, got)
		}
		if IsScalingError(http.StatusInternalServerError, []byte(body)) {
			t.Errorf("%s with another status", body)
		}
	}
}

func TestIsMissingEndpoint(t *testing.T) {
	const disabled = `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.","type":"PermissionDeniedError","param":null,"code":403}}`
	for _, c := range []struct {
		status int
		body   string
		want   bool
	}{
		{404, `{"detail":"Not Found"}`, true},
		{404, "", true},
		{404, " \n", true},
		{403, disabled, true},
		{404, disabled, false},
		{403, "", false},
		{403, errorJSON("not allowed"), false},
		{403, errorJSON("why does it say: Scale-out endpoints are disabled."), false},
		{404, `{"error":{"message":"The model x does not exist.","type":"NotFoundError","param":"model","code":404}}`, false},
		{404, `{"error":{"message":"Response with id 'x' not found.","type":"invalid_request_error","param":"response_id","code":404}}`, false},
		{404, `{"detail":"Item not found"}`, false},
		{404, `{"detail":["Not Found"]}`, false},
		{404, "404 page not found", false},
		{404, `{"detail":"Not Found"}` + strings.Repeat(" ", 2000), false},
		{405, `{"detail":"Method Not Allowed"}`, false},
		{500, "", false},
		{200, "", false},
	} {
		if got := IsMissingEndpoint(c.status, []byte(c.body)); got != c.want {
			t.Errorf("%d %.60s: %v, want %v", c.status, c.body, got, c.want)
		}
	}
}
