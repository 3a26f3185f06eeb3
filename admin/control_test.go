package admin

import (
	"strings"
	"testing"
)

// TestInvalidActions checks what is refused before a replica hears of it.
func TestInvalidActions(t *testing.T) {
	a := askable(t)
	a.post("/api/backends/none/sleep", "", 404, "available: gpu-0, gpu-1, gpu-2")
	a.post("/api/backends/sleep", `{"backends":["gpu-0","none"]}`, 404, "available: gpu-0")
	a.post("/api/backends/gpu-0/sleep", `{"backends":["gpu-0"]}`, 400, "the path names a backend")
	a.post("/api/backends/sleep", `{"backends":[]}`, 400, "leave it out for all")
	a.post("/api/backends/sleep", `{"level":9}`, 400, "level must be")
	a.post("/api/backends/sleep", `{"depth":1}`, 400, "unknown field")
	a.post("/api/backends/load-adapter", `{"adapter":"a"}`, 400, "path is missing")
	a.post("/api/backends/sleep", `{"backends":["`+strings.Repeat("x", maxPostBytes)+`"]}`, 413, "longer than")
	a.post("/api/backends/dance", "", 405, "POST /api/backends/sleep, ") // the path of a backend of that name
	a.post("/api/backends/gpu-0/dance", "", 404, "POST /api/backends/{name}/sleep, ")
	if status, _ := a.send("POST", "/api/backends/sleep", "", "Content-Type", "text/plain"); status != 415 {
		t.Errorf("a body that is not declared as JSON: %d", status)
	}
}
