package loadgen

import (
	"testing"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// TestAgentsReuseTheirPrompts plays conversations in each API on one replica, which has all
// of each previous turn cached.
func TestAgentsReuseTheirPrompts(t *testing.T) {
	const blockTokens = 16
	for _, api := range []API{ChatAPI, MessagesAPI, ResponsesAPI} {
		t.Run(string(api), func(t *testing.T) {
			replica := startReplica(t, sim.Config{BytesPerToken: 3, Engine: engine.Config{Speed: 100, BlockSize: blockTokens}})
			httpClient := NewHTTPClient()
			defer httpClient.CloseIdleConnections()
			client := &Client{URL: replica.URL(), HTTP: httpClient, Speed: 100, Timeout: failsafe}
			agents := &Agents{
				API: api, Model: "sim", Conversations: 3, Turns: 4, ToolSets: 1, SystemBytes: 2000, Tools: 3, ToolBytes: 300,
				TaskBytes: Range{100, 200}, ResultBytes: 500, ReplyTokens: Range{5, 9}, ToolTime: time.Second, SessionHeader: "x-session-id",
			}
			for i, run := range client.RunAgents(t.Context(), agents) {
				if len(run.Results) != agents.Turns || run.Task <= 0 {
					t.Fatalf("conversation %d: %d turns in %v: %+v", i, len(run.Results), run.Task, run.Results)
				}
				for turn, r := range run.Results {
					if r.Err != "" {
						t.Fatalf("conversation %d, turn %d: %s %s", i, turn, r.Err, r.Detail)
					}
					if turn == 0 {
						continue
					}
					before := run.Results[turn-1]
					if want := (before.PromptTokens + before.CompletionTokens - 1) / blockTokens * blockTokens; r.CachedTokens != want ||
						r.PromptTokens <= want {
						t.Errorf("conversation %d, turn %d: %d of %d tokens cached, want %d", i, turn, r.CachedTokens, r.PromptTokens, want)
					}
				}
			}
		})
	}
}
