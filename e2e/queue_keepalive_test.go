package e2e

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// TestSDKSkipsQueueKeepAlives has a stream wait in the admission queue, behind one that keeps the
// only replica busy. The SDK gets keep-alive comments before the chunks, or before an error.
func TestSDKSkipsQueueKeepAlives(t *testing.T) {
	replica := startSimProcess(t, "--step-time", "20ms")
	config := (&simFleet{}).configFile(t, `
backends: [{url: "http://`+replica.address+`", max_in_flight: 1}]
routing: {queue: {busy_timeout: 2s}}
sse: {queue_keepalive: 100ms}
`)
	proxy := startProgram(t, "--config", config.path)
	client := openai.NewClient(option.WithBaseURL(proxy.url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	chat := func(tokens int64) openai.ChatCompletionNewParams {
		return openai.ChatCompletionNewParams{Model: "sim", MaxTokens: openai.Int(tokens),
			Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hello")}}
	}
	for _, c := range []struct {
		name       string
		busyTokens int64 // of 20 ms each
		want       string
	}{{"served", 50, ""}, {"refused", 1000, "busy"}} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			busy := client.Chat.Completions.NewStreaming(ctx, chat(c.busyTokens), option.WithJSONSet("ignore_eos", true))
			defer busy.Close()
			if !busy.Next() {
				t.Fatal(busy.Err())
			}
			var resp *http.Response
			queued := client.Chat.Completions.NewStreaming(ctx, chat(5), option.WithResponseInto(&resp))
			defer queued.Close()
			var text strings.Builder
			for queued.Next() {
				if choices := queued.Current().Choices; len(choices) > 0 {
					text.WriteString(choices[0].Delta.Content)
				}
			}
			if err := queued.Err(); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v", err)
			}
			if reason := resp.Header.Get("X-Warmroute-Reason"); resp.StatusCode != http.StatusOK || reason != "queued" {
				t.Errorf("status %d and reason %q, want 200 and queued", resp.StatusCode, reason)
			}
			if (text.Len() > 0) != (c.want == "") {
				t.Errorf("got the text %q", text.String())
			}
		})
	}
}
