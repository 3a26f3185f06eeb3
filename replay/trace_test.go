package replay

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseTrace(t *testing.T) {
	got, err := ParseTrace(strings.NewReader(
		`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}` + "\n\n" +
			`{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [0]}` + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []TraceRequest{
		{At: 0, PromptTokens: 600, AnswerTokens: 5, Blocks: []uint64{0, 7}},
		{At: 3 * time.Second, PromptTokens: 512, AnswerTokens: 1, Blocks: []uint64{0}},
	}
	if !reflect.DeepEqual(got.Requests, want) {
		t.Errorf("got %+v, want %+v", got.Requests, want)
	}
}

func TestParseTraceNamesTheLine(t *testing.T) {
	good := `{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [0]}`
	f := func(bad, want string) {
		t.Helper()
		_, err := ParseTrace(strings.NewReader(good + "\n" + bad + "\n"))
		if err == nil || !strings.HasPrefix(err.Error(), "trace line 2: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want line 2 and %q", bad, err, want)
		}
	}
	f(`{`, "unexpected end")
	f(`{"input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp is missing")
	f(`{"timestamp": -1, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp -1")
	f(`{"timestamp": 1e300, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "timestamp 1e+300")
	f(`{"timestamp": 2999, "input_length": 10, "output_length": 1, "hash_ids": [0]}`, "earlier")
	f(`{"timestamp": 3000, "input_length": 0, "output_length": 1, "hash_ids": []}`, "input_length 0")
	f(`{"timestamp": 3000, "input_length": 99999999, "output_length": 1, "hash_ids": [0]}`, "input_length 99999999")
	f(`{"timestamp": 3000, "input_length": 10, "output_length": -1, "hash_ids": [0]}`, "output_length -1")
	f(`{"timestamp": 3000, "input_length": 513, "output_length": 1, "hash_ids": [0]}`, "makes 2 blocks")
	f(`{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [-4]}`, "hash_ids")
	f(strings.Repeat(" ", maxTraceLine+1), "too long")
}

func TestParseTraceRefusesAnEmptyOne(t *testing.T) {
	if _, err := ParseTrace(strings.NewReader("\n")); err == nil {
		t.Error("no error")
	}
}

func FuzzParseTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}`))
	f.Add([]byte("{\"timestamp\": 1}\n{\"timestamp\": 0}"))
	f.Add([]byte(`{"timestamp": 0.5, "input_length": 1e2, "hash_ids": [18446744073709551615]}`))
	f.Add([]byte(header(5000) + `
{"timestamp":40.5,"input_length":140,"input_bytes":560,"counted":true,"output_length":30,"hash_ids":[7,8],"stream":true,"code":200,"model":0,"session":3}
{"timestamp":20,"input_length":64,"input_bytes":256,"output_length":0,"hash_ids":[7],"code":503}
` + header(9000) + `
{"timestamp":0,"input_length":2000,"input_bytes":256,"counted":true,"output_length":7,"hash_ids":[7],"code":499}
`))
	f.Fuzz(func(t *testing.T, data []byte) {
		tr, err := ParseTrace(strings.NewReader(string(data)))
		if err != nil {
			return
		}
		tr.Spread(1)
		tr.Stretch(0.9, 8)
		last := time.Duration(math.MinInt64)
		for _, r := range tr.Requests {
			if r.At < last {
				t.Fatalf("arrival at %v after one at %v", r.At, last)
			}
			last = r.At
			if n := (r.PromptTokens + tr.BlockTokens - 1) / tr.BlockTokens; len(r.Blocks) != n || n == 0 {
				t.Fatalf("%d tokens have %d blocks of %d", r.PromptTokens, len(r.Blocks), tr.BlockTokens)
			}
		}
	})
}

// at makes a trace of requests with these stamps in milliseconds, each of so many tokens.
func at(tokens int, stamps ...int) *Trace {
	t := &Trace{}
	for _, ms := range stamps {
		t.Requests = append(t.Requests, TraceRequest{At: time.Duration(ms) * time.Millisecond, PromptTokens: tokens})
	}
	return t
}

func TestSpreadStaysBelowTheNextStamp(t *testing.T) {
	tr := at(1, 0, 0, 0, 3000, 10_000, 10_000, 20_000, 20_000)
	tr.Spread(1)
	inside := func(i int, from, to time.Duration) {
		t.Helper()
		if got := tr.Requests[i].At; got < from || got > to {
			t.Errorf("request %d at %v, want %v to %v", i, got, from, to)
		}
	}
	for i := range 3 {
		inside(i, 0, 3*time.Second)
	}
	inside(3, 3*time.Second, 3*time.Second) // a stamp of its own is left alone
	for i := 4; i < 6; i++ {
		inside(i, 10*time.Second, 13100*time.Millisecond) // 3.1 s at most
	}
	for i := 6; i < 8; i++ {
		inside(i, 20*time.Second, 23100*time.Millisecond) // the last stamp has no next
	}
	for i := range tr.Requests[1:] {
		if tr.Requests[i].At > tr.Requests[i+1].At {
			t.Errorf("request %d is later than the next", i)
		}
	}
	if tr.Requests[0].At == tr.Requests[1].At {
		t.Error("equal stamps stayed equal")
	}
}

func TestSpreadIsTheSameForASeed(t *testing.T) {
	f := func(seed uint64) string {
		tr := at(1, 0, 0, 0, 3000)
		tr.Spread(seed)
		return fmt.Sprint(tr.Requests)
	}
	if first, again := f(1), f(1); first != again {
		t.Error("one seed gave two arrivals")
	}
	if f(1) == f(2) {
		t.Error("two seeds gave one arrival")
	}
}

func TestStretch(t *testing.T) {
	// 4 × 16,000 tokens in 4 s on two backends of 8,000 tokens/s: all they can do.
	tr := at(16_000, 1000, 2000, 3000, 5000)
	if got := tr.Load(2); math.Abs(got-1) > 1e-9 {
		t.Errorf("load %v, want 1", got)
	}
	tr.Stretch(0.5, 2)
	want := []time.Duration{0, 2 * time.Second, 4 * time.Second, 8 * time.Second}
	for i, r := range tr.Requests {
		if r.At != want[i] {
			t.Errorf("request %d at %v, want %v", i, r.At, want[i])
		}
	}
	if got := tr.Load(2); math.Abs(got-0.5) > 1e-9 {
		t.Errorf("load %v, want 0.5", got)
	}
}

func TestStretchLeavesOneInstantAlone(t *testing.T) {
	tr := at(16_000, 1000, 1000)
	tr.Stretch(0.5, 2)
	if got := tr.Requests[1].At; got != time.Second {
		t.Errorf("arrival at %v, want 1s", got)
	}
}
