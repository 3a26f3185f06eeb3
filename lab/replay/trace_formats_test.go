package replay

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func parseLines(t *testing.T, lines ...string) *Trace {
	t.Helper()
	trace, err := ParseTrace(strings.NewReader(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// commonBlocks returns how many leading blocks two requests share.
func commonBlocks(a, b TraceRequest) (n int) {
	for n < min(len(a.Blocks), len(b.Blocks)) && a.Blocks[n] == b.Blocks[n] {
		n++
	}
	return n
}

// withoutBlocks returns the requests without their blocks.
func withoutBlocks(t *Trace) []TraceRequest {
	requests := slices.Clone(t.Requests)
	for i := range requests {
		requests[i].Blocks = nil
	}
	return requests
}

const (
	bailianFirst = `{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40, "output_length": 132, ` +
		`"type": "text", "turn": 1, "hash_ids": [5, 6, 7]}`
	bailianSecond = `{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 64, "output_length": 80, ` +
		`"type": "text", "turn": 2, "hash_ids": [5, 6, 7, 8]}`
)

// TestBailianTrace has a third chat with the same text of its second block, after another first one.
func TestBailianTrace(t *testing.T) {
	trace := parseLines(t, bailianFirst, bailianSecond,
		`{"chat_id": 161, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, "output_length": 0, "hash_ids": [9, 6]}`)
	want := []TraceRequest{
		{At: 0, PromptTokens: 40, OutputTokens: 132, Conversation: 1},
		{At: 250 * time.Millisecond, PromptTokens: 33, OutputTokens: 1, Conversation: 3},
		{At: 1250 * time.Millisecond, PromptTokens: 64, OutputTokens: 80, Conversation: 1},
	}
	if got := withoutBlocks(trace); !reflect.DeepEqual(got, want) || trace.BlockTokens != 16 {
		t.Errorf("got %+v in blocks of %d, want %+v", got, trace.BlockTokens, want)
	}
	first, other, second := trace.Requests[0], trace.Requests[1], trace.Requests[2]
	if commonBlocks(first, second) != 3 || len(other.Blocks) != 3 || slices.Contains(first.Blocks, other.Blocks[1]) {
		t.Errorf("blocks %v, %v, %v", first.Blocks, second.Blocks, other.Blocks)
	}
}

const wekaSession = `{"id": "trace_0001", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 100, "requests": [` +
	`{"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 20, "hash_ids": [1, 2]}, ` +
	`{"t": 10.0, "type": "subagent", "agent_id": "a", "requests": [{"t": 2.0, "type": "s", "in": 100, "out": 5, "hash_ids": [1, 9]}]}, ` +
	`{"t": 30.0, "type": "s", "model": "m", "in": 200, "out": 30, "hash_ids": [1, 2, 3, 4]}]}`

// TestWekaTrace has two sessions, whose ids mean different blocks, and a subagent whose times begin with it.
func TestWekaTrace(t *testing.T) {
	trace := parseLines(t, wekaSession, strings.ReplaceAll(wekaSession, "trace_0001", "trace_0002"))
	want := []TraceRequest{
		{At: 0, PromptTokens: 130, OutputTokens: 20, Conversation: 1, NotStreamed: true},
		{At: 12 * time.Second, PromptTokens: 100, OutputTokens: 5, Conversation: 2},
		{At: 15 * time.Second, PromptTokens: 130, OutputTokens: 20, Conversation: 3, NotStreamed: true},
		{At: 27 * time.Second, PromptTokens: 100, OutputTokens: 5, Conversation: 4},
		{At: 30 * time.Second, PromptTokens: 200, OutputTokens: 30, Conversation: 1},
		{At: 45 * time.Second, PromptTokens: 200, OutputTokens: 30, Conversation: 3},
	}
	if got := withoutBlocks(trace); !reflect.DeepEqual(got, want) || trace.BlockTokens != 64 {
		t.Errorf("got %+v in blocks of %d, want %+v", got, trace.BlockTokens, want)
	}
	r := trace.Requests
	if commonBlocks(r[0], r[4]) != 2 || commonBlocks(r[0], r[1]) != 1 || commonBlocks(r[0], r[2]) != 0 {
		t.Errorf("blocks of the first session %v, %v, %v, of the second %v", r[0].Blocks, r[1].Blocks, r[4].Blocks, r[2].Blocks)
	}
	global := strings.ReplaceAll(wekaSession, "local", "global")
	if r := parseLines(t, global, global).Requests; commonBlocks(r[0], r[2]) != 2 {
		t.Errorf("with ids of all sessions: %v, %v", r[0].Blocks, r[2].Blocks)
	}
}

const liteLLMRowInObject = `{"request_id": "a", "startTime": "2026-11-29T10:00:00.5Z", "prompt_tokens": 40, ` +
	`"completion_tokens": 7, "session_id": "s", ` +
	`"metadata": {"prefix_block_hashes": {"version": "1", "block_size": 16, "hash_ids": ["00000000000000ff", "a1", "a2"]}}}`

// TestLiteLLMTrace has metadata as an object and as a string, a prompt that another tokenizer counts as longer than its blocks, and a
// row without ids.
func TestLiteLLMTrace(t *testing.T) {
	trace := parseLines(t, liteLLMRowInObject,
		`{"startTime": "2026-11-29 10:00:02", "prompt_tokens": 99, "completion_tokens": 1, `+
			`"metadata": "{\"prefix_block_hashes\": {\"ids\": [\"ff\", \"b1\"], \"block_size\": 16}}"}`,
		`{"startTime": "2026-11-29T10:00:03Z", "prompt_tokens": 9, "completion_tokens": 1, "metadata": {}}`)
	want := []TraceRequest{
		{At: 0, PromptTokens: 40, OutputTokens: 7, Conversation: 1, Blocks: []uint64{0xff, 0xa1, 0xa2}},
		{At: 1500 * time.Millisecond, PromptTokens: 32, OutputTokens: 1, Blocks: []uint64{0xff, 0xb1}},
	}
	if !reflect.DeepEqual(trace.Requests, want) || trace.BlockTokens != 16 {
		t.Errorf("got %+v in blocks of %d, want %+v", trace.Requests, trace.BlockTokens, want)
	}
	ids := strings.Repeat(`"1",`, 62) + `"1"`
	trace = parseLines(t, `{"startTime": "2026-11-29T10:00:03Z", "prompt_tokens": 2003, "metadata": {"prefix_block_hashes": [`+ids+`]}}`)
	if trace.BlockTokens != 32 || trace.Requests[0].PromptTokens != 2003 {
		t.Errorf("%d tokens in 63 blocks of unknown size: %d in blocks of %d", 2003, trace.Requests[0].PromptTokens, trace.BlockTokens)
	}
}

func TestTraceFormatErrors(t *testing.T) {
	for _, tc := range []struct{ line, old, new, want string }{
		{bailianFirst, `"timestamp": 61.25, `, ``, "trace line 1: timestamp is missing"},
		{bailianFirst, `61.25`, `-1`, "trace line 1: timestamp -1000 is not between"},
		{bailianFirst, `"input_length": 40`, `"input_length": 80`,
			"trace line 1: hash_ids: 80 tokens make 5 blocks of 16 tokens, there are ids of 3"},
		{bailianFirst, `132`, `-1`, "trace line 1: output_length -1"},
		{wekaSession, `"block_size": 64`, `"block_size": 0`, "trace line 1: block_size 0"},
		{wekaSession, `local`, `other`, `trace line 1: hash_id_scope "other"`},
		{wekaSession, `"in": 200`, `"in": 2000`, "trace line 1: requests[2]: hash_ids: 2000 tokens make 32 blocks"},
		{wekaSession, `"t": 2.0, `, ``, "trace line 1: requests[1]: requests[0]: t is missing"},
		{wekaSession, `"out": 5`, `"out": -5`, "trace line 1: requests[1]: requests[0]: out -5"},
		{wekaSession, `"subagent"`, `"agent"`, `trace line 1: requests[1]: type "agent" is neither`},
		{liteLLMRowInObject, `2026-11-29T10`, `yesterday`, "trace line 1: startTime"},
		{liteLLMRowInObject, `"prompt_tokens": 40`, `"prompt_tokens": -4`, "trace line 1: prompt_tokens -4"},
		{liteLLMRowInObject, `"a2"`, `"g"`, `trace line 1: metadata: prefix_block_hashes: "g" is not`},
		{liteLLMRowInObject, `16`, `1e9`, "trace line 1: metadata: prefix_block_hashes: block size 1e9"},
		{liteLLMRowInObject, `prefix_block_hashes`, `other`, "enable the callback"},
	} {
		if !strings.Contains(tc.line, tc.old) {
			t.Fatalf("%q is not in %s", tc.old, tc.line)
		}
		_, err := ParseTrace(strings.NewReader(strings.Replace(tc.line, tc.old, tc.new, 1)))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s in place of %s: %v, want %q", tc.new, tc.old, err, tc.want)
		}
	}
}

// TestWriteMooncake exports a trace with small blocks and reads it again: the prompts share the same tokens, in whole blocks of 512.
func TestWriteMooncake(t *testing.T) {
	trace := &Trace{BlockTokens: 100}
	for _, second := range []uint64{2, 2, 3} {
		q := TraceRequest{At: time.Second * time.Duration(second), PromptTokens: 1500, OutputTokens: 9, Conversation: second}
		for i := range uint64(15) {
			if i < 11 {
				q.Blocks = append(q.Blocks, i)
			} else {
				q.Blocks = append(q.Blocks, 100*second+i)
			}
		}
		trace.Requests = append(trace.Requests, q)
	}
	var out strings.Builder
	if err := trace.WriteMooncake(&out); err != nil {
		t.Fatal(err)
	}
	again := parseLines(t, out.String())
	if got, want := withoutBlocks(again), withoutBlocks(trace); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if r := again.Requests; len(r[0].Blocks) != 3 || commonBlocks(r[0], r[1]) != 3 || commonBlocks(r[0], r[2]) != 2 {
		t.Errorf("blocks of a prompt %v, of the same one %v, of one that shares 1,100 tokens %v", r[0].Blocks, r[1].Blocks, r[2].Blocks)
	}
}
