package main

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

func TestPooledCachedTokens(t *testing.T) {
	turn := func(prompt, cached, completion int) replay.Result {
		return replay.Result{PromptTokens: prompt, CachedTokens: cached, CompletionTokens: completion}
	}
	runs := []loadgen.AgentRun{
		{ToolSet: 0, Results: []replay.Result{turn(200, 0, 10), turn(300, 0, 10), turn(400, 0, 10)}}, // 208, 304 are possible
		{ToolSet: 0, Results: []replay.Result{turn(200, 160, 10), {Err: "status 500"}, turn(300, 0, 1)}},
		{ToolSet: 1, Results: []replay.Result{turn(100, 0, 10)}},
		{ToolSet: 0, Results: []replay.Result{turn(200, 0, 10)}},
	}
	if got, want := pooledCachedTokens(runs, 16), 208+304+2*160; got != want {
		t.Errorf("%d tokens, want %d", got, want)
	}
}

func TestReadRecordedSessions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	if err := os.WriteFile(path, []byte(`{"agent":"a","session":"1","timestamp_ms":0,"input":"short","output":"four more words here"}
{"agent":"a","session":"1","timestamp_ms":1000,"input":"other","output":"x"}
{"agent":"a","session":"1","timestamp_ms":2000,"input":"a longer prompt","output":"x"}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	sessions, err := readRecordedSessions(path, 5, 2, 3)
	if err != nil || len(sessions) != 1 || len(sessions[0].Turns) != 2 || sessions[0].Turns[0].OutputTokens != 3 ||
		sessions[0].Turns[1].OutputTokens != 2 {
		t.Errorf("%+v, %v; want the short prompts with outputs of 3 and 2 tokens", sessions, err)
	}
}

func TestSummarizeRecorded(t *testing.T) {
	run := func(agent string, task time.Duration, prompt, cached int) loadgen.AgentRun {
		result := replay.Result{PromptTokens: prompt, CachedTokens: cached, CachedKnown: true}
		return loadgen.AgentRun{Agent: agent, Task: task, Results: []replay.Result{result}}
	}
	reports := summarizeRecorded([]loadgen.AgentRun{
		run("b", 10*time.Second, 100, 0), run("a", 20*time.Second, 200, 100), run("b", 30*time.Second, 300, 300),
	}, time.Minute, 2, 10)
	for i, want := range []struct {
		agent            string
		hits, task, load float64
	}{
		{"a", 0.5, 20, 1. / 3}, // 100 tokens computed, in the 30 s that two at a time take for 60 s of sessions
		{"b", 0.75, 20, 1. / 3},
		{"all", 2. / 3, 20, 2. / 3},
	} {
		r := reports[i]
		near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
		if r.Agent != want.agent || !near(r.Summary.HitRatio, want.hits) || !near(r.TaskMean, want.task) || !near(r.Load, want.load) {
			t.Errorf("report %d: %+v, want %+v", i, r, want)
		}
	}
}
