package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// readMetric returns the value of a series of a page of metrics.
func readMetric(t *testing.T, url, series string) float64 {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindSubmatch(page)
	if found == nil {
		return 0
	}
	value, err := strconv.ParseFloat(string(found[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// A key pays for what the engine has made of abandoned requests that are not streamed, where nothing is: the replica's counters tell.
func TestAbandonedWholeRequestsCharged(t *testing.T) {
	t.Parallel()
	const secret = "a-key-of-more-than-twenty-characters"
	for _, c := range []struct {
		name   string
		engine engine.Config
		others int    // requests of clients that do not come through the proxy
		tokens int    // of each of these
		prompt string // of these
	}{
		{name: "alone"},
		{name: "slow", engine: engine.Config{Speed: 0.05}},
		{name: "beside long contexts", engine: engine.Config{KVTokens: 4_000_000}, others: 24, tokens: 400,
			prompt: strings.Repeat("word ", 8000)},
		{name: "behind others", engine: engine.Config{MaxSeqs: 8}, others: 8, tokens: 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, _ := startSimReplica(t, sim.Config{Engine: c.engine}, "127.0.0.1:0")
			p := startProgram(t, "--config", (&simFleet{urls: []string{url}}).configFile(t, "keys_file: "+writeFile(t, "k "+secret+"\n")).path)
			ask := func(ctx context.Context, url, prompt string, tokens int) error {
				body := fmt.Sprintf(`{"model":"sim","ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, tokens, prompt)
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("Authorization", "Bearer "+secret)
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					return err
				}
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				if err == nil && resp.StatusCode != http.StatusOK {
					t.Errorf("status %d, %.200s", resp.StatusCode, text)
				}
				return err
			}
			if c.prompt != "" { // else each of the others would compute it
				if err := ask(t.Context(), url, c.prompt, 1); err != nil {
					t.Fatal(err)
				}
			}
			const generated = `vllm:generation_tokens_total{engine="0",model_name="sim"}`
			before := readMetric(t, url, generated)
			var clients sync.WaitGroup
			for range c.others {
				clients.Go(func() {
					if err := ask(t.Context(), url, c.prompt, c.tokens); err != nil {
						t.Error(err)
					}
				})
			}
			if c.others > 0 {
				p.eventually("the others have begun", func() bool { return readMetric(t, url, generated) >= before+float64(c.others) })
			}
			for i := range 8 {
				clients.Go(func() {
					ctx, abandon := context.WithTimeout(t.Context(), time.Duration(3000+200*i)*time.Millisecond)
					defer abandon()
					if err := ask(ctx, p.url, fmt.Sprint("request ", i), 100_000); err == nil {
						t.Error("a request was not abandoned")
					}
				})
			}
			clients.Wait()
			p.eventually("nothing is in flight", func() bool {
				return readMetric(t, p.admin, `warmroute_key_in_flight{key="k"}`) == 0 &&
					readMetric(t, url, `vllm:num_requests_running{engine="0",model_name="sim"}`) == 0
			})
			made := readMetric(t, url, generated) - before - float64(c.others*c.tokens)
			charged := readMetric(t, p.admin, `warmroute_key_output_tokens_total{key="k"}`)
			t.Logf("the engine has generated %.0f tokens, of which %.0f are charged: %.2f", made, charged, charged/made)
			if charged < 0.7*made || charged > 1.3*made {
				t.Errorf("the engine has generated %.0f tokens, of which %.0f are charged", made, charged)
			}
		})
	}
}
