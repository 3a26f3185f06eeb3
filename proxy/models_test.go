package proxy

import (
	"net/http"
	"testing"

	"warmroute/backends"
)

func TestModelListIsTheUnionWithEveryFieldKept(t *testing.T) {
	f := serve(t, nil, &replica{}, &replica{}, &replica{})
	card := func(id, json string) backends.Model { return backends.Model{ID: id, Root: id, Card: []byte(json)} }
	a := `{"id":"a",  "object":"model","created":1,"owned_by":"vllm","root":"/models/a","parent":null,"max_model_len":8192,"permission":[{"id":"x"}],"new_field":{"k":[1,2]}}`
	b, c := `{"id":"org/b","root":"org/b"}`, `{"id":"lora","parent":"a"}`
	f.backends[0].SetModels([]backends.Model{card("a", a)})
	f.backends[1].SetModels([]backends.Model{card("org/b", b), card("a", `{"id":"a","owned_by":"another's view"}`)})
	f.backends[2].SetModels([]backends.Model{card("lora", c)})
	f.backends[1].SetState(backends.Down) // what it listed last is kept
	for range 3 {
		resp, got := f.get("/v1/models")
		if want := `{"object":"list","data":[` + a + "," + b + "," + c + "]}"; got != want || resp.Header.Get("Content-Type") != "application/json" {
			t.Fatalf("got %s\nwant %s", got, want)
		}
	}
	for path, want := range map[string]string{"a": a, "org/b": b, "org%2Fb": b, "org%2fb": b, "lora": c, "%61": a} {
		if resp, got := f.get("/v1/models/" + path); resp.StatusCode != http.StatusOK || got != want {
			t.Errorf("%s: got %d %s", path, resp.StatusCode, got)
		}
	}
	for _, path := range []string{"none", "", "A", "a/", "org//b", "a%00"} {
		resp, got := f.get("/v1/models/" + path)
		if refused(t, got); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%q: got %d %s", path, resp.StatusCode, got)
		}
	}
}

func TestHealth(t *testing.T) {
	f := serve(t, nil, &replica{}, &replica{})
	check := func(want map[string]int) {
		t.Helper()
		for path, status := range want {
			if resp, _ := f.get(path); resp.StatusCode != status {
				t.Errorf("GET %s: %d, want %d", path, resp.StatusCode, status)
			}
			resp, err := f.client.Head(f.url + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != status {
				t.Errorf("HEAD %s: %d, want %d", path, resp.StatusCode, status)
			}
		}
	}
	f.backends[0].SetState(backends.Down)
	check(map[string]int{"/livez": 200, "/readyz": 200, "/health": 200, "/version": 200, "/v1/models": 200, "/v1/models/m": 200, "/v1/models/none": 404})
	f.backends[1].SetState(backends.Draining)
	check(map[string]int{"/livez": 200, "/readyz": 503, "/health": 503, "/version": 200, "/v1/models": 200})
	resp, answer := f.get("/readyz")
	if refused(t, answer); resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	if _, got := f.get("/version"); got != `{"version":"1.2.3"}` {
		t.Errorf("version %s", got)
	}
}
