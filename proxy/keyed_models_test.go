package proxy

import (
	"net/http"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/proxy/apikey"
)

func TestAKeySeesOnlyItsModels(t *testing.T) {
	a := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", whole))}
	b := &replica{models: []string{"n", "hidden<n"}, script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(
		keyOf("all", nil),
		keyOf("some", func(k *apikey.Key) { k.Models = []string{"lora", "n", "nowhere"} }),
		keyOf("adapter", func(k *apikey.Key) { k.Models = []string{"lora"} }),
		keyOf("none", func(k *apikey.Key) { k.Models = []string{"nowhere"} }),
	), a, b)
	get := func(name, path string) (int, string) {
		t.Helper()
		req, _ := http.NewRequest(http.MethodGet, f.url+path, nil)
		req.Header.Set("Authorization", bearer(name)[1])
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var answer strings.Builder
		resp.Write(&answer)
		return resp.StatusCode, answer.String()
	}
	for name, want := range map[string][4]bool{"all": {true, true, true, true}, "some": {false, true, true, false}, "adapter": {false, true, false, false}, "none": {}} {
		_, list := get(name, "/v1/models")
		for i, id := range []string{"m", "lora", "n", "hidden"} {
			if strings.Contains(list, `"id": "`+id+`"`) != want[i] {
				t.Errorf("%s sees %s: %v", name, id, !want[i])
			}
			status, _ := get(name, "/v1/models/"+id)
			resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"`+id+`"`, 1), bearer(name)...)
			_, unknown := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"unknown"`, 1), bearer(name)...)
			if want[i] != (status == 200) || want[i] != (resp.StatusCode == 200) {
				t.Errorf("%s asks for %s: %d and %d %s", name, id, status, resp.StatusCode, answer)
			}
			if !want[i] && strings.ReplaceAll(answer, "`"+id+"`", "`unknown`") != unknown {
				t.Errorf("%s can tell %s from an unknown model:\n%s\n%s", name, id, answer, unknown)
			}
		}
	}
	// What a request means that names none.
	for name, want := range map[string]int{"all": 400, "some": 200, "adapter": 400, "none": 404} {
		before := len(b.requests())
		resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m",`, ``, 1), bearer(name)...)
		if resp.StatusCode != want || want == 200 && len(b.requests()) == before {
			t.Errorf("%s names no model: got %d %s", name, resp.StatusCode, answer)
		}
	}
}

func TestAFormThatReadersCouldReadDifferentlyIsNoWayAroundAModelList(t *testing.T) {
	r := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("all", nil), keyOf("some", func(k *apikey.Key) { k.Models = []string{"m"} })), r)
	part := "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n"
	for body, want := range map[string]int{
		part + "m\r\n--x--":               200,
		part + "lora\r\n--x--":            404,
		part + "m\r\n":                    400,
		"--x\r\nbroken\r\n" + part + "m":  400,
		part + "m\r\n" + part + "lora":    400,
		"--y\r\nthe wrong boundary--y--":  400,
		part + "m\r\n--x--\r\n" + "after": 200, // behind the end
	} {
		resp, answer, err := f.try("/v1/audio/transcriptions", body, append(bearer("some"), "Content-Type", "multipart/form-data; boundary=x")...)
		if err != nil || resp.StatusCode != want {
			t.Errorf("%q: got %d %s, want %d", body, resp.StatusCode, answer, want)
		}
	}
	resp, _, err := f.try("/v1/audio/transcriptions", "no form", append(bearer("all"), "Content-Type", "text/plain")...)
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("for all models: got %v, %v", resp, err)
	}
}

func TestModelsOfAKeyAmongAliases(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) { k.Models = []string{"alias"} })), &replica{script: always(answered("200 OK", whole))})
	f.backends[0].SetModels([]backends.Model{{ID: "m", Root: "r", Card: []byte(`{"id":"m"}`)}, {ID: "alias", Root: "r", Card: []byte(`{"id":"alias"}`)}})
	if resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m",`, ``, 1), bearer("a")...); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	f.counts(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="alias"} 1`)
}
