package sim

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// fetch sends a request and returns the status and the body of the response.
func fetch(t *testing.T, method, url, body string) (status int, response string) {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(out)
}

func TestStoredResponses(t *testing.T) {
	s := start(t, Config{StoreResponses: true})
	question := strings.Repeat("What do you make of this? ", 40)
	status, first := fetch(t, "POST", s.URL()+"/v1/responses", `{"input":"`+question+`","max_output_tokens":8}`)
	id := gjson.Get(first, "id").Str
	if status != 200 || id == "" {
		t.Fatalf("status %d %s", status, first)
	}
	if status, again := fetch(t, "GET", s.URL()+"/v1/responses/"+id, ""); status != 200 || again != first {
		t.Errorf("GET: status %d %s", status, again)
	}
	if status, response := fetch(t, "POST", s.URL()+"/v1/responses/"+id+"/cancel", ""); status != 400 {
		t.Errorf("cancel: status %d %s", status, response)
	}
	// The prompt continues the stored one, so that most of it is cached.
	_, second := fetch(t, "POST", s.URL()+"/v1/responses",
		`{"input":[{"role":"user","content":"Why?"}],"max_output_tokens":8,"previous_response_id":"`+id+`"}`)
	before, prompt, cached := gjson.Get(first, "usage.input_tokens").Int(), gjson.Get(second, "usage.input_tokens").Int(),
		gjson.Get(second, "usage.input_tokens_details.cached_tokens").Int()
	if prompt <= before+8 || cached < before-32 {
		t.Errorf("the prompt of the second turn has %d tokens, %d of them cached; that of the first had %d", prompt, cached, before)
	}
	_, unstored := fetch(t, "POST", s.URL()+"/v1/responses", `{"input":"x","max_output_tokens":1,"store":false,"request_id":"mine"}`)
	for _, missing := range []string{gjson.Get(unstored, "id").Str, "resp_none"} {
		if status, response := fetch(t, "GET", s.URL()+"/v1/responses/"+missing, ""); status != 404 ||
			gjson.Get(response, "error.param").Str != "response_id" {
			t.Errorf("%s: status %d %s", missing, status, response)
		}
	}
	if status, _ := fetch(t, "DELETE", s.URL()+"/v1/responses/"+id, ""); status != http.StatusMethodNotAllowed {
		t.Errorf("DELETE: status %d", status)
	}
	s.Restart()
	if status, response := fetch(t, "POST", s.URL()+"/v1/responses", `{"input":"x","previous_response_id":"`+id+`"}`); status != 404 {
		t.Errorf("after a restart: status %d %s", status, response)
	}
}

func TestResponseStoreIsBounded(t *testing.T) {
	var s responseStore
	for i := range maxStoredResponses + 10 {
		s.add(strconv.Itoa(i), storedResponse{object: []byte("{}")})
	}
	if _, err := s.find("9"); err == nil || len(s.byID) != maxStoredResponses || len(s.ids) != maxStoredResponses ||
		s.bytes != 2*maxStoredResponses {
		t.Errorf("%d responses of %d bytes are kept: %v", len(s.byID), s.bytes, err)
	}
	s.add("large", storedResponse{items: strings.Repeat("x", maxStoredBytes-2)})
	if len(s.byID) != 2 {
		t.Errorf("%d responses are kept beside a large one", len(s.byID)-1)
	}
}
