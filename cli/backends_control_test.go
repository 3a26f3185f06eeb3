package cli

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestControlCommands checks what commands send, and what they print.
func TestControlCommands(t *testing.T) {
	var request, response string
	status := http.StatusOK
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		request = r.Method + " " + r.URL.Path + " " + string(body)
		w.WriteHeader(status)
		io.WriteString(w, response)
	}))
	defer admin.Close()
	const (
		ok     = `{"action":"a","results":[{"backend":"gpu-0","ok":true,"status":200,"seconds":0.314}]}`
		failed = `{"action":"a","results":[{"backend":"gpu-0","ok":true,"status":200,"seconds":2},{"backend":"gpu-1","ok":false,` +
			`"error":"no\u0007response","seconds":60}],` +
			`"error":{"message":"a failed on 1 of 2 backends","src":"warmroute"}}`
		none = `{"error":{"message":"unknown backend; available: gpu-0","src":"warmroute"}}`
	)
	for _, c := range []struct {
		args          string
		status        int
		response      string
		request       string
		exit          int
		stdout, error string
	}{
		{"sleep --all", 200, ok, "POST /api/backends/sleep {}", 0, "NAME   RESULT  STATUS  SECONDS  ERROR\ngpu-0  ok      200     0.31     \n",
			""},
		{"sleep gpu-0 --level 2 --wait 90s --force", 200, ok,
			`POST /api/backends/sleep {"backends":["gpu-0"],"force":true,"level":2,"wait":"1m30s"}`, 0, "gpu-0", ""},
		{"wake gpu-0 gpu-1 --tags weights,kv_cache", 200, ok,
			`POST /api/backends/wake {"backends":["gpu-0","gpu-1"],"tags":["weights","kv_cache"]}`, 0, "gpu-0", ""},
		{"pause --all --mode keep --clear-cache=false --timeout 5m", 200, ok,
			`POST /api/backends/pause {"clear_cache":false,"mode":"keep","timeout":"5m0s"}`, 0, "gpu-0", ""},
		{"resume --all --json", 200, ok, `POST /api/backends/resume {}`, 0, ok + "\n", ""},
		{"reset-cache --all", 502, failed, `POST /api/backends/reset-cache {}`, 1, "gpu-1  failed  -       60.00    no",
			"a failed on 1 of 2 backends"},
		{"reset-cache none", 404, none, `POST /api/backends/reset-cache {"backends":["none"]}`, 1, "", "available: gpu-0"},
		{"load-adapter --all --adapter sql --path /a/sql --in-place", 200, ok,
			`POST /api/backends/load-adapter {"adapter":"sql","in_place":true,"path":"/a/sql"}`, 0, "gpu-0", ""},
		{"unload-adapter gpu-0 --adapter sql", 200, ok, `POST /api/backends/unload-adapter {"adapter":"sql","backends":["gpu-0"]}`, 0, "gpu-0",
			""},
		{"resume --all", 200, "hello", `POST /api/backends/resume {}`, 1, "", "unexpected response"},
		{"sleep", 200, ok, "", 2, "", "name backends, or use --all"},
		{"sleep gpu-0 --all", 200, ok, "", 2, "", "name backends, or use --all"},
		{"sleep --all --level deep", 200, ok, "", 2, "", `--level: "deep" is not a whole number`},
		{"load-adapter --all --adapter sql", 200, ok, "", 2, "", "--path is missing"},
	} {
		request, response, status = "", c.response, c.status
		exit, stdout, stderr := execute(t.Context(), t, append([]string{"backends"}, strings.Fields(c.args+" --admin "+admin.URL)...)...)
		if request != c.request || exit != c.exit || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.error) ||
			strings.Contains(stdout, "\a") {
			t.Errorf("%s: exit status %d, request %q, output %q%q", c.args, exit, request, stdout, stderr)
		}
	}
}
