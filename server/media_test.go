package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// The estimate of a prompt with an image becomes what the replica reports, and an image sent by
// its uuid alone is in the cache of the replica that was sent it.
func TestMedia(t *testing.T) {
	t.Parallel()
	const imageTokens = 3000
	g := startGuarded(t, 2, sim.Config{MediaTokens: imageTokens, Engine: engine.Config{Speed: 20}}, nil)
	ask := func(part string) (backend string, matched, estimated, cached, tokens int) {
		t.Helper()
		resp, err := http.Post(g.url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(
			`{"max_tokens":2,"messages":[{"role":"user","content":[{"type":"text","text":%q},%s]}]}`, known, part)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var body struct {
			Usage struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&body); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("status %d, %v", resp.StatusCode, err)
		}
		if _, err := fmt.Sscanf(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "%d/%d", &matched, &estimated); err != nil {
			t.Fatal(err)
		}
		return resp.Header.Get("X-Warmroute-Backend"), matched, estimated, body.Usage.Details.Cached, body.Usage.Prompt
	}
	_, _, estimated, _, tokens := ask(`{"type":"image_url","image_url":{"url":"http://images/first"}}`)
	if tokens < imageTokens || estimated > tokens/2 {
		t.Fatalf("%d tokens estimated before anything is known, of %d", estimated, tokens)
	}
	for n := range 15 {
		ask(fmt.Sprintf(`{"type":"image_url","image_url":{"url":"http://images/%d"}}`, n))
	}
	backend, matched, estimated, cached, tokens := ask(`{"type":"image_url","image_url":{"url":"http://images/u"},"uuid":"u"}`)
	if estimated < tokens*9/10 || estimated > tokens*11/10 {
		t.Errorf("%d tokens estimated, the replica counts %d", estimated, tokens)
	}
	if matched > imageTokens/2 || cached > imageTokens/2 {
		t.Errorf("%d tokens matched, %d cached of an image sent for the first time", matched, cached)
	}
	again, matched, _, cached, tokens := ask(`{"type":"image_url","image_url":null,"uuid":"u"}`)
	if again != backend || matched < tokens*9/10 || cached < tokens*9/10 {
		t.Errorf("%d tokens matched on %s, %d cached of %d, the image is on %s", matched, again, cached, tokens, backend)
	}
}
