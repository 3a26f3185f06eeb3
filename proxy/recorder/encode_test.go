package recorder

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
)

func TestEncode(t *testing.T) {
	r := newRecorder(t, filepath.Join(t.TempDir(), "traffic"), 1<<20, 1)
	at := func(ms float64) time.Time { return r.encode.start.Add(time.Duration(ms * float64(time.Millisecond))) }
	r.run(
		Request{Arrived: at(1.5), Model: "secret-model", Conversation: 0xfeedfacefeedface, Streams: true, Bytes: 700, Plain: true,
			Blocks: []prompt.Block{0xdeadbeefdeadbeef, 0xabad1deaabad1dea}, PromptTokens: 170, CachedTokens: 64, CachedKnown: true,
			OutputTokens: 9, Code: 200, TTFT: 12*time.Millisecond + 345*time.Microsecond, Duration: time.Second},
		Request{Arrived: at(1.25), Model: "other", Bytes: 700, Blocks: []prompt.Block{0xdeadbeefdeadbeef, 7}, Code: 503},
		Request{Arrived: at(2), Model: "secret-model", Conversation: 5, Code: 499},
		Request{Arrived: at(3), Bytes: 100, ExtraBytes: 300, PromptTokens: 90, OutputTokens: 1, Code: 200}, // a list
		Request{Arrived: at(3), Bytes: 100, ExtraBytes: 300, Code: 503},
	)
	got := read(t, r.file)
	want := []string{
		fmt.Sprintf(`{"warmroute_record":2,"started_ms":%d,"block_bytes":256,"block_tokens":64}`, r.encode.start.UnixMilli()),
		`{"timestamp":1.5,"input_length":170,"input_bytes":700,"counted":true,"output_length":9,"cached_tokens":64,"code":200,"stream":true,` +
			`"model":0,"session":1,"ttft_ms":12.345,"duration_ms":1000,"block_runs":[0,2]}`,
		`{"timestamp":1.25,"input_length":175,"input_bytes":700,"output_length":0,"code":503,"stream":false,"model":1,"duration_ms":0,` +
			`"block_runs":[0,1,2,1]}`,
		`{"timestamp":2,"input_length":0,"input_bytes":0,"output_length":0,"code":499,"stream":false,"model":0,"session":2,"duration_ms":0,` +
			`"block_runs":[]}`,
		`{"timestamp":3,"input_length":90,"input_bytes":100,"extra_bytes":300,"output_length":1,"code":200,"stream":false,"duration_ms":0,` +
			`"block_runs":[]}`,
		`{"timestamp":3,"input_length":100,"input_bytes":100,"extra_bytes":300,"output_length":0,"code":503,"stream":false,"duration_ms":0,` +
			`"block_runs":[]}`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if info, err := os.Stat(r.file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestMaxLineLength(t *testing.T) {
	e := newEncoder(time.Now(), 64, 2*runOverhead*maxRequestBlocks, minKnownConversations)
	e.blocks.next, e.conversations.next, e.models.next = 1<<40-2*maxRequestBlocks, 1<<40, 1<<40 // after years
	q := Request{
		Arrived: e.start.Add(maxTimestamp - time.Microsecond), Model: "m", Conversation: 1, Bytes: maxInputBytes / 2,
		ExtraBytes: maxInputBytes / 2,
		Plain:      true, Blocks: make([]prompt.Block, maxRequestBlocks), PromptTokens: maxPromptTokens, CachedTokens: math.MaxInt,
		CachedKnown:  true,
		OutputTokens: maxOutputTokens, Code: 200, TTFT: math.MaxInt64, Duration: math.MaxInt64,
	}
	for i := range q.Blocks {
		q.Blocks[i] = prompt.Block(i)
		e.blocks.findOrAssign(q.Blocks[i : i+1])
		e.blocks.next++ // no two numbers are consecutive
	}
	if line := e.encode(&q).appendLine(nil); !e.isReplayable(&q) || len(line) > maxLineBytes || len(line) < maxLineBytes/2 {
		t.Errorf("a line of %d bytes, of at most %d", len(line), maxLineBytes)
	}
}

// A clock that is set while the proxy runs must not move requests: both times
// have to have a monotonic reading.
func TestMonotonicTimestamps(t *testing.T) {
	if e := newEncoder(time.Now(), 256, minKnownBlocks, minKnownConversations); e.start == e.start.Round(0) {
		t.Errorf("the start %v has none", e.start)
	}
}

// TestBlockNumbers gives prompts that begin with others' beginnings, and expects that a block has one number for as long
// as it is remembered, which no other block has.
func TestBlockNumbers(t *testing.T) {
	const minKnown = 20_000
	n := blockNumbers{minKnown: minKnown}
	rng := rand.New(rand.NewPCG(1, 1))
	given := map[uint64]prompt.Block{}
	last := map[prompt.Block]uint64{}
	var prompts [][]prompt.Block
	next, always := prompt.Block(1), []prompt.Block{0}
	for i := range 5000 {
		var blocks []prompt.Block
		switch {
		case i%10 == 0:
			blocks = always
		case len(prompts) > 0 && rng.IntN(4) > 0:
			other := prompts[max(0, len(prompts)-1-rng.IntN(100))]
			if rng.IntN(20) == 0 { // which may be forgotten
				other = prompts[rng.IntN(len(prompts))]
			}
			blocks = slices.Clone(other[:1+rng.IntN(len(other))])
		}
		if i%10 != 0 {
			for range rng.IntN(20) {
				blocks = append(blocks, next)
				next++
			}
		}
		if len(blocks) == 0 {
			continue
		}
		prompts = append(prompts, blocks)
		for rest := blocks; len(rest) > 0; {
			number, count := n.findOrAssign(rest)
			for k, block := range rest[:count] {
				id := number + uint64(k)
				if owner, taken := given[id]; taken && owner != block {
					t.Fatalf("block %d has the number %d of block %d", block, id, owner)
				}
				if before, known := last[block]; known && before != id && block == always[0] {
					t.Fatalf("block %d was forgotten, though it is seen all the time", block)
				}
				given[id], last[block] = block, id
			}
			rest = rest[count:]
		}
		if limit := minKnown + 100 + runOverhead; n.size > limit {
			t.Fatalf("%d are known, more than %d", n.size, limit)
		}
	}
	if len(given) == len(last) {
		t.Error("no block was forgotten")
	}
	if len(given) > 2*len(last) {
		t.Errorf("%d numbers for %d blocks", len(given), len(last))
	}
}

func TestNumbers(t *testing.T) {
	n := numbers[int]{minKnown: 100}
	given := map[uint64]int{}
	last := map[int]uint64{}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		k := rng.IntN(1000)
		if rng.IntN(2) == 0 {
			k = rng.IntN(5) // seen all the time
		}
		id := n.findOrAssign(k)
		if owner, taken := given[id]; taken && owner != k {
			t.Fatalf("%d has the number that %d had", k, owner)
		}
		if before, known := last[k]; known && k < 5 && before != id {
			t.Fatalf("%d was forgotten, though it is seen all the time", k)
		}
		given[id], last[k] = k, id
		if len(n.young) > 100 || len(n.old) > 100 {
			t.Fatalf("%d and %d are known", len(n.young), len(n.old))
		}
	}
	if len(given) < 2000 {
		t.Errorf("only %d numbers for things that were forgotten again and again", len(given))
	}
}

// FuzzEntry asserts that damaged entries are an error, and that an entry is what it was encoded from.
func FuzzEntry(f *testing.F) {
	f.Add((&entry{timestamp: 1, flags: hasModel, runs: []uint64{1, 2, 1 << 40, 1}}).appendBinary(nil))
	f.Add([]byte{0xff})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var e, again entry
		rest, err := e.parseBinary(data)
		if err != nil {
			return
		}
		if left, err := again.parseBinary(append(e.appendBinary(nil), rest...)); err != nil || string(left) != string(rest) ||
			string(again.appendLine(nil)) != string(e.appendLine(nil)) {
			t.Errorf("%x: %+v became %+v, and %x %x, %v", data, e, again, rest, left, err)
		}
	})
}
