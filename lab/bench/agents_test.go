package main

import (
	"testing"

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
