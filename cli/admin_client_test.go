package cli

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A token that the proxy does not accept is named by where it is from; one that is missing is asked for.
func TestWrongAdminToken(t *testing.T) {
	const invalid = "invalid admin token: send this proxy's admin_token"
	listener := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		message := "missing admin token: send the admin_token as Authorization: Bearer TOKEN"
		if r.Header.Get("Authorization") != "" {
			message = invalid
		}
		w.WriteHeader(http.StatusUnauthorized)
		w.Write([]byte(`{"error":{"message":"` + message + `","src":"warmroute"}}`))
	}))
	defer listener.Close()
	const token = "some-token-of-operators-012345678"
	tokenFile := writeFile(t, token)
	settings, settingsWithFile := writeFile(t, "admin_token: "+token), writeFile(t, "admin_token_file: "+tokenFile)
	for _, c := range []struct {
		variable, value string
		args            []string
		want            string
	}{
		{"", "", nil, "use --token-file, or set WARMROUTE_ADMIN_TOKEN"},
		{"WARMROUTE_ADMIN_TOKEN", token, nil, invalid + " (the token is that of WARMROUTE_ADMIN_TOKEN)"},
		{"WARMROUTE_ADMIN_TOKEN_FILE", tokenFile, nil, invalid + " (the token is that of " + tokenFile + ")"},
		{"WARMROUTE_ADMIN_TOKEN", token, []string{"--token-file", tokenFile}, invalid + " (the token is that of --token-file " + tokenFile + ")"},
		{"", "", []string{"--config", settings}, invalid + " (the token is that of the setting admin_token)"},
		{"", "", []string{"--config", settingsWithFile}, invalid + " (the token is that of " + tokenFile + ")"},
		{"WARMROUTE_ADMIN_TOKEN", token, []string{"--config", settingsWithFile}, invalid + " (the token is that of WARMROUTE_ADMIN_TOKEN)"},
	} {
		t.Run("", func(t *testing.T) {
			if c.variable != "" {
				t.Setenv(c.variable, c.value)
			}
			for _, command := range []string{"explain -f " + tokenFile, "requests", "backends list", "backends sleep --all"} {
				status, _, stderr := execute(t.Context(), t, append(append(strings.Fields(command), "--admin", listener.URL), c.args...)...)
				if status != 1 || !strings.Contains(stderr, listener.URL) || !strings.Contains(stderr, c.want) {
					t.Errorf("%s=%s %s %q: status %d, %s; want %q", c.variable, c.value, command, c.args, status, stderr, c.want)
				}
			}
		})
	}
}
