package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/activity"
	"warmroute/proxy/relay"
)

// A key pays for what the engine generates, whether or not the response is read to its end.
func TestAbandonedRequestCharged(t *testing.T) {
	t.Parallel()
	body := func(fields string) string { return strings.Replace(askWhole, "{", "{"+fields+",", 1) }
	const prompts = `{"model":"m","prompt":["a","b","c"],"max_tokens":3}`
	long := `{"choices":[{"message":{"content":"` + strings.Repeat("x", 3*relay.MaxBufferedBytes) + `"}}]}`
	for _, c := range []struct {
		name, path, body string
		script           func(*session)
		cancels          bool // an operator does, not the client
		want             int  // output tokens
	}{
		{"not streamed", "/v1/chat/completions", body(`"n":20,"max_tokens":3`), hang(), false, 60},
		{"best of", "/v1/completions", `{"model":"m","prompt":"a","best_of":5,"max_tokens":3}`, hang(), false, 15},
		{"several prompts", "/v1/completions", prompts, hang(), false, 9},
		{"messages", "/v1/messages", body(`"max_tokens":3`), hang(), false, 3},
		{"responses", "/v1/responses", `{"model":"m","input":"a","max_output_tokens":3}`, hang(), false, 3},
		{"half of a response", "/v1/chat/completions", body(`"n":20,"max_tokens":3`), hang(answered("200 OK", whole)[:200]), false, 60},
		{"cancelled", "/v1/chat/completions", body(`"n":20,"max_tokens":3`), hang(), true, 60},
		{"most of a long response", "/v1/chat/completions", askWhole, hang(answered("200 OK", long)[:2*relay.MaxBufferedBytes]), false,
			len(long) / bytesPerToken},
		{"a stream", "/v1/chat/completions", strings.Replace(askStream, "{", `{"max_tokens":3,`, 1),
			hang(sseHead, chunk(role), chunk(hello), chunk(world)), false, 3},
		{"a stream of hidden reasoning", "/v1/chat/completions",
			strings.Replace(askStream, "{", `{"include_reasoning":false,"n":20,"max_tokens":3,`, 1), hang(sseHead, chunk(role)), false, 60},
		{"a stream without events", "/v1/chat/completions", askStream, hang(sseHead), false, 0},
		{"no output", "/v1/embeddings", `{"model":"m","input":"a"}`, hang(), false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, withKeys(keyOf("a", nil)), &replica{script: c.script})
			ctx, disconnect := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", bearer("a")[1])
			done := make(chan struct{})
			go func() {
				defer close(done)
				if resp, err := f.client.Do(req); err == nil {
					defer resp.Body.Close()
					io.Copy(io.Discard, resp.Body)
				}
			}()
			eventually(t, "the request is in flight", func() bool { return f.backends[0].InFlight.Load()+f.backends[0].NoEngineInFlight.Load() > 0 })
			time.Sleep(300 * time.Millisecond) // in which each sequence has 12 tokens at the default rate
			if c.cancels {
				f.proxy.Activity().Cancel(f.only(activity.FirstToken).Handle)
				<-done
			}
			disconnect()
			<-done
			f.awaitIdle()
			f.awaitMetric(fmt.Sprintf(`warmroute_key_output_tokens_total{key="a"} %d`, c.want))
		})
	}
}

// A response that does not say how long it is costs its key something.
func TestResponseWithoutUsageCharged(t *testing.T) {
	noUsage := strings.Split(whole, `,"usage"`)[0] + "}"
	f := serve(t, withKeys(keyOf("a", nil)), &replica{script: always(answered("200 OK", noUsage))})
	f.post("/v1/chat/completions", askWhole, bearer("a")...)
	f.awaitMetric(fmt.Sprintf(`warmroute_key_output_tokens_total{key="a"} %d`, len(noUsage)/bytesPerToken))
}

// What a replica did not complete is not the client's fault.
func TestFailedAttemptsNotCharged(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", nil)), &replica{script: always(answered("500 Internal Server Error", "{}"))},
		&replica{script: always(answered("200 OK", wholeAbort))},
		&replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole, bearer("a")...)
	f.awaitMetric(`warmroute_key_output_tokens_total{key="a"} 3`)
	f.awaitMetric(`warmroute_key_prompt_tokens_total{key="a"} 12`)
}
