package replay

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// header begins a run of a recording.
func header(started int) string {
	return fmt.Sprintf(`{"warmroute_record":2,"started_ms":%d,"block_bytes":256,"block_tokens":64}`, started)
}

func parseRecorded(lines ...string) (*Trace, error) {
	return ParseTrace(strings.NewReader(strings.Join(lines, "\n") + "\n"))
}

func TestRecordingInOrderOfArrival(t *testing.T) {
	got, err := parseRecorded(
		header(5000),
		`{"timestamp":40.5,"input_length":140,"input_bytes":560,"counted":true,"output_length":30,"block_runs":[7,2],"stream":true,"code":200,`+
			`"model":0,"session":3,"ttft_ms":12.25,"duration_ms":300,"cached_tokens":64}`,
		`{"timestamp":20,"input_length":64,"input_bytes":256,"counted":true,"output_length":7,"block_runs":[7,1],"stream":false,"code":200}`,
		`{"timestamp":60,"input_length":10,"input_bytes":40,"output_length":0,"block_runs":[],"stream":true,"code":499}`,
	)
	if err != nil {
		t.Fatal(err)
	}
	want := &Trace{BlockTokens: 64, Requests: []TraceRequest{
		{At: 0, PromptTokens: 64, OutputTokens: 7, Blocks: []uint64{7}, NotStreamed: true},
		{At: 20500 * time.Microsecond, PromptTokens: 140, OutputTokens: 30, Blocks: []uint64{7, 8, firstUniqueID}, Conversation: 3},
		{At: 40 * time.Millisecond, PromptTokens: 10, OutputTokens: 19, Blocks: []uint64{firstUniqueID + 1}},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestRecordingRunsShareNoIDs(t *testing.T) {
	line := func(at, id int) string {
		return fmt.Sprintf(`{"timestamp":%d,"input_length":64,"input_bytes":256,"output_length":1,"block_runs":[%d,1],"session":1,"code":200}`,
			at, id)
	}
	// The second file continues the first run, the third is another run's.
	got, err := parseRecorded(header(1000), line(0, 0), line(1, 1), header(1000), line(2, 1), line(3, 2), header(9000), line(0, 1))
	if err != nil {
		t.Fatal(err)
	}
	var ids, sessions []uint64
	for _, r := range got.Requests {
		ids, sessions = append(ids, r.Blocks...), append(sessions, r.Conversation)
	}
	if fmt.Sprint(ids) != "[0 1 1 2 4]" || fmt.Sprint(sessions) != "[1 1 1 1 3]" {
		t.Errorf("blocks %v, sessions %v", ids, sessions)
	}
	if at := got.Requests[4].At; at != 8*time.Second {
		t.Errorf("the second run begins at %v, want 8s", at)
	}
}

func TestRecordingPromptLengths(t *testing.T) {
	line := func(input, bytes, blocks int, counted bool) string {
		ids := strings.TrimSuffix(strings.Repeat("0,1,", blocks), ",")
		return fmt.Sprintf(`{"timestamp":0,"input_length":%d,"input_bytes":%d,"counted":%v,"output_length":1,"block_runs":[%s],"code":200}`,
			input, bytes, counted, ids)
	}
	beside := func(input, bytes, blocks, extra int) string {
		return strings.Replace(line(input, bytes, blocks, false), `"counted"`, fmt.Sprintf(`"extra_bytes":%d,"counted"`, extra), 1)
	}
	// 5 bytes a token in all: a block is 51 tokens.
	got, err := parseRecorded(header(1),
		line(2000, 10_000, 39, true), // as it is
		line(1900, 10_000, 39, true), // its text is less dense …
		line(2200, 10_500, 41, true), // … and more dense than the rest
		line(9, 1000, 3, false),      // not counted: 200 by the mean
		line(1950, 9750, 0, true),    // nothing of it is known
		line(1950, 9750, 10, true),   // its beginning is
		beside(450, 1000, 3, 1500),   // a list of prompts: the first is 1000 bytes
		beside(700, 0, 0, 5000),      // a body that has no canonical prompt, counted
	)
	if err != nil {
		t.Fatal(err)
	}
	if got.BlockTokens != 51 {
		t.Fatalf("a block of %d tokens, want 51", got.BlockTokens)
	}
	for i, want := range []struct{ tokens, full, named int }{
		{2000, 39, 39}, {1989, 39, 39}, {2141, 41, 41}, {200, 3, 3}, {1950, 38, 0}, {1950, 38, 10}, {500, 9, 3}, {700, 13, 0},
	} {
		r := got.Requests[i]
		named := 0
		for _, id := range r.Blocks {
			if id < firstUniqueID {
				named++
			}
		}
		if r.PromptTokens != want.tokens || r.PromptTokens/51 != want.full || named != want.named || len(r.Blocks) != want.full+1 &&
			want.tokens%51 != 0 {
			t.Errorf("request %d: %d tokens, %d blocks, %d of them named; want %+v", i, r.PromptTokens, len(r.Blocks), named, want)
		}
	}
}

func TestRecordingReplayableRequests(t *testing.T) {
	f := func(code, output, want int) {
		t.Helper()
		got, err := parseRecorded(header(1),
			`{"timestamp":0,"input_length":9,"input_bytes":40,"output_length":50,"block_runs":[],"code":200}`,
			fmt.Sprintf(`{"timestamp":1,"input_length":9,"input_bytes":40,"output_length":%d,"block_runs":[],"code":%d}`, output, code))
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Requests) == 1 && want == 0 {
			return
		}
		if len(got.Requests) != 2 || got.Requests[1].OutputTokens != want {
			t.Errorf("code %d with an output of %d: %+v, want an output of %d", code, output, got.Requests, want)
		}
	}
	f(200, 0, 1)
	f(400, 0, 0)
	f(404, 0, 0)
	f(429, 0, 50) // there was no room: an output like the others
	f(503, 0, 50)
	f(499, 5, 5) // the client disconnected
	f(502, 8, 8) // truncated
}

func TestRecordingErrorsNameTheLine(t *testing.T) {
	f := func(bad, want string) {
		t.Helper()
		_, err := parseRecorded(header(1), bad)
		if err == nil || !strings.HasPrefix(err.Error(), "trace line 2: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want line 2 and %q", bad, err, want)
		}
	}
	f(`{`, "unexpected end")
	f(`{"input_length":1,"code":200}`, "timestamp is missing")
	f(`{"timestamp":-1,"input_length":1,"code":200}`, "timestamp -1")
	f(`{"timestamp":0,"input_length":-1,"code":200}`, "input_length -1")
	f(`{"timestamp":0,"input_length":1,"output_length":99999999,"code":200}`, "output_length")
	f(`{"timestamp":0,"input_length":1,"input_bytes":1000000000,"code":200}`, "input_bytes")
	f(`{"timestamp":0,"input_length":1,"extra_bytes":-1,"code":200}`, "extra_bytes")
	f(`{"timestamp":0,"input_length":1,"input_bytes":16777216,"extra_bytes":1,"code":200}`, "extra_bytes")
	f(`{"timestamp":0,"input_length":1,"input_bytes":511,"block_runs":[1,2],"code":200}`, "makes 1 blocks")
	f(`{"timestamp":0,"input_length":1,"input_bytes":511,"block_runs":[1],"code":200}`, "expected pairs")
	f(`{"timestamp":0,"input_length":1,"input_bytes":511,"block_runs":[1,1,9,18446744073709551615],"code":200}`, "has more")
	f(`{"timestamp":0,"input_length":1,"input_bytes":256,"block_runs":[2000000000000,1],"code":200}`, "above")
	f(`{"warmroute_record":3,"started_ms":1,"block_bytes":256}`, "version 3")
	f(`{"warmroute_record":2,"started_ms":1,"block_bytes":8}`, "block_bytes 8")
	f(`{"warmroute_record":2,"started_ms":1,"block_bytes":512}`, "changes from 256 to 512")
	f(`{"warmroute_record":2,"started_ms":-1,"block_bytes":256}`, "out of range")

	if _, err := parseRecorded(header(1)); err == nil {
		t.Error("a recording without requests: no error")
	}
	line := `{"timestamp":0,"input_length":1,"code":200}`
	if _, err := parseRecorded(header(1), line, header(1<<40), line); err == nil || !strings.Contains(err.Error(), "a year") {
		t.Errorf("requests 35 years apart: error %v", err)
	}
}

// The blocks of an output that came back in the next turn are hit in the next.
func TestRecordedConversationHitsOutput(t *testing.T) {
	var lines []string
	for turn := range 10 {
		n := 20 * (turn + 1)
		lines = append(lines, fmt.Sprintf(
			`{"timestamp":%d,"input_length":%d,"input_bytes":%d,"counted":true,"output_length":640,"block_runs":[0,%d],"stream":true,"code":200}`,
			20_000*turn, 64*n, 256*n, n))
	}
	trace, err := parseRecorded(append([]string{header(1)}, lines...)...)
	if err != nil {
		t.Fatal(err)
	}
	s := Scenario{Backends: 1, Policy: "prefix", Workload: Traced{Trace: trace}}
	got, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	// Of each turn's 20 new blocks 10 are the output before, and the last token is never hit.
	hit, all := 0, 0
	for turn := range 10 {
		all += 64 * 20 * (turn + 1)
		if turn > 0 {
			hit += 64 * (20*turn + 10)
		}
	}
	if want := float64(hit) / float64(all); got.HitRatio < want-0.01 || got.HitRatio > want+0.001 || got.PromptTokens != all {
		t.Errorf("hit ratio %.4f of %d tokens, want %.4f of %d", got.HitRatio, got.PromptTokens, want, all)
	}
}
