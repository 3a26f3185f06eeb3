package sim

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"warmroute/lab/sim/engine"
)

// decodeBatch returns what a batch tells, with its events as maps.
func decodeBatch(payload []byte) (at float64, events []map[string]any, rank int64, err error) {
	v, rest, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		return 0, nil, 0, err
	}
	batch, ok := v.([]any)
	if !ok || len(batch) != 3 || len(rest) > 0 {
		return 0, nil, 0, msgp.ErrShortBytes
	}
	for _, event := range batch[1].([]any) {
		events = append(events, event.(map[string]any))
	}
	return batch[0].(float64), events, batch[2].(int64), nil
}

// toUint converts a decoded integer, whatever its type.
func toUint(v any) uint64 {
	switch v := v.(type) {
	case int64:
		return uint64(v)
	case uint64:
		return v
	}
	return math.MaxUint64
}

// engineEvent returns the event of an engine that a decoded event of vLLM tells of.
func engineEvent(t *testing.T, event map[string]any) engine.KVEvent {
	t.Helper()
	var e engine.KVEvent
	switch event["type"] {
	case "AllBlocksCleared":
		e.Kind = engine.CacheCleared
		return e
	case "BlockRemoved":
		e.Kind = engine.BlockRemoved
	case "BlockStored":
		e.Kind = engine.BlocksStored
	default:
		t.Fatalf("unknown event %v", event["type"])
	}
	for _, h := range event["block_hashes"].([]any) {
		e.Hashes = append(e.Hashes, engine.BlockHash(toUint(h)))
	}
	if e.Kind == engine.BlockRemoved {
		return e
	}
	q := &sequence{}
	if event["parent_block_hash"] != nil {
		e.Parent, e.First = engine.BlockHash(toUint(event["parent_block_hash"])), 1
		q.kvEvents.tokens = make([]uint32, toUint(event["block_size"])) // those of the parent
	}
	for _, token := range event["token_ids"].([]any) {
		q.kvEvents.tokens = append(q.kvEvents.tokens, uint32(toUint(token)))
	}
	q.Owner = q
	e.Request = &q.Request
	return e
}

// TestBatchesLikeVLLM encodes the events that a real vLLM 0.32 has published.
func TestBatchesLikeVLLM(t *testing.T) {
	file, err := os.Open("testdata/vllm-0.32/kv-events.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	batches := 0
	for lines.Scan() {
		if !strings.HasPrefix(lines.Text(), "frames=3 ") {
			continue
		}
		var golden []byte
		for range 3 { // the topic, the sequence number, the payload
			lines.Scan()
			if golden, err = hex.DecodeString(strings.TrimSpace(lines.Text())); err != nil {
				t.Fatal(err)
			}
		}
		at, decoded, rank, err := decodeBatch(golden)
		if err != nil {
			t.Fatal(err)
		}
		var events []engine.KVEvent
		for _, event := range decoded {
			events = append(events, engineEvent(t, event))
		}
		batches++
		if got := appendBatch(nil, time.UnixMicro(int64(math.Round(at*1e6))), events, 32, int(rank)); !bytes.Equal(got, golden) {
			t.Errorf("batch %d:\n%x, want\n%x", batches, got, golden)
		}
	}
	if lines.Err() != nil || batches != 4 {
		t.Fatalf("%d batches read, error %v, want 4", batches, lines.Err())
	}
}

// TestBatchFields checks what the captured batches lack: adapters, salts, sessions, the host
// tier and other ranks.
func TestBatchFields(t *testing.T) {
	q := &sequence{kvEvents: kvEventContext{tokens: []uint32{1, 2, 3, 300, 5, 70_000}, adapter: adapter{id: 3, name: "sql"}, salt: "s",
		session: "a"}}
	q.Owner = q
	plain := &sequence{kvEvents: kvEventContext{tokens: []uint32{1, 2}, salt: "s"}}
	plain.Owner = plain
	got := appendBatch(nil, time.Unix(1, 500_000_000), []engine.KVEvent{
		{Hashes: []engine.BlockHash{7, 1 << 63}, Request: &q.Request},
		{Hashes: []engine.BlockHash{9}, Parent: 1 << 63, Request: &q.Request, First: 2},
		{Hashes: []engine.BlockHash{8}, Request: &plain.Request},
		{Host: true, Hashes: []engine.BlockHash{7}},
		{Host: true, Kind: engine.BlockRemoved, Hashes: []engine.BlockHash{7}},
	}, 2, 5)
	var text bytes.Buffer
	if _, err := msgp.CopyToJSON(&text, bytes.NewReader(got)); err != nil {
		t.Fatal(err)
	}
	const want = `[1.5,[` +
		`{"type":"BlockStored","block_hashes":[7,9223372036854775808],"parent_block_hash":null,"token_ids":[1,2,3,300],"block_size":2,` +
		`"lora_id":3,"medium":"GPU","lora_name":"sql","extra_keys":[["sql","s"],["sql"]],"group_idx":0,"kv_cache_spec_kind":"full_attention",` +
		`"session_id":"a"},` +
		`{"type":"BlockStored","block_hashes":[9],"parent_block_hash":9223372036854775808,"token_ids":[5,70000],"block_size":2,` +
		`"lora_id":3,"medium":"GPU","lora_name":"sql","extra_keys":[["sql"]],"group_idx":0,"kv_cache_spec_kind":"full_attention",` +
		`"session_id":"a"},` +
		`{"type":"BlockStored","block_hashes":[8],"parent_block_hash":null,"token_ids":[1,2],"block_size":2,` +
		`"lora_id":null,"medium":"GPU","lora_name":null,"extra_keys":[["s"]],"group_idx":0,"kv_cache_spec_kind":"full_attention"},` +
		`{"type":"BlockStored","block_hashes":[7],"parent_block_hash":null,"token_ids":[],"block_size":0,` +
		`"lora_id":null,"medium":"CPU","lora_name":null,"group_idx":0},` +
		`{"type":"BlockRemoved","block_hashes":[7],"medium":"CPU","group_idx":0}],5]`
	if text.String() != want {
		t.Errorf("got\n%s, want\n%s", text.String(), want)
	}
}

// TestGroupFields checks what the captured batches of groups lack: salts of which the first block is kept or not, and removals.
func TestGroupFields(t *testing.T) {
	q := &sequence{kvEvents: kvEventContext{tokens: []uint32{1, 2, 3, 4}, salt: "s"}}
	q.Blocks, q.Owner = []engine.BlockHash{7, 8}, q
	state, window := &engine.Group{Kind: engine.State}, &engine.Group{Index: 1, Kind: engine.SlidingWindow, Window: 3}
	got := appendBatch(nil, time.Unix(1, 0), []engine.KVEvent{
		{Group: state, Hashes: []engine.BlockHash{8}, NotKept: 1, Request: &q.Request},
		{Group: window, Hashes: []engine.BlockHash{7}, NotKept: 1, Request: &q.Request},
		{Group: window, NotKept: 2, Request: &q.Request},
		{Group: window, Kind: engine.BlockRemoved, Hashes: []engine.BlockHash{7}},
	}, 2, 0)
	var text bytes.Buffer
	if _, err := msgp.CopyToJSON(&text, bytes.NewReader(got)); err != nil {
		t.Fatal(err)
	}
	stored := func(hashes, extra, group string) string {
		return `{"type":"BlockStored","block_hashes":[` + hashes + `],"parent_block_hash":null,"token_ids":[1,2,3,4],"block_size":2,` +
			`"lora_id":null,"medium":"GPU","lora_name":null,"extra_keys":[` + extra + `],"group_idx":` + group + `},`
	}
	const slidingWindow = `1,"kv_cache_spec_kind":"sliding_window","kv_cache_spec_sliding_window":3`
	want := `[1,[` + stored("8", "null", `0,"kv_cache_spec_kind":"mamba"`) + stored("7", `["s"]`, slidingWindow) +
		stored("", "", slidingWindow) +
		`{"type":"BlockRemoved","block_hashes":[7],"medium":"GPU","group_idx":1}],0]`
	if text.String() != want {
		t.Errorf("got\n%s, want\n%s", text.String(), want)
	}
}

// TestGroupEventsLikeVLLM computes the prompts that a real vLLM 0.32 has computed with hybrid models, and compares the batches to
// the byte.
func TestGroupEventsLikeVLLM(t *testing.T) {
	for _, c := range []struct {
		file   string
		cfg    engine.Config
		prompt int   // tokens of each
		cached []int // tokens of each
	}{
		{"groups-0.32-mamba.txt", engine.Config{BlockSize: 544, Groups: engine.Groups{States: 3}}, 1200, []int{0, 0, 544}},
		{"groups-0.32-sliding-window.txt", engine.Config{BlockSize: 32, Groups: engine.Groups{Windows: 5, Window: 64}}, 352, []int{0, 0, 256}},
	} {
		t.Run(c.file, func(t *testing.T) {
			c.cfg.StepTokens, c.cfg.KVEvents = 2048, true
			e := engine.New(c.cfg)
			golden := readGroupBatches(t, c.file)
			var now time.Duration
			var before *sequence // the prompt before, which this one begins like
			for i, cached := range c.cached {
				q := newGoldenSequence(t, golden, "s"+strconv.Itoa(i+1), before)
				q.Prompt, q.Output = c.prompt, 2
				if err := e.Add(&q.Request, now); err != nil {
					t.Fatal(err)
				}
				for !e.Idle() {
					step := e.Step(now)
					now = step.End
					if len(step.KVEvents) == 0 {
						continue
					}
					if len(golden) == 0 {
						t.Fatal("more batches than vLLM sent")
					}
					const header = 10 // with the time
					if got := appendBatch(nil, time.Time{}, step.KVEvents, c.cfg.BlockSize, 0); !bytes.Equal(got[header:], golden[0][header:]) {
						t.Errorf("prompt %d: batch\n%x, vLLM sent\n%x", i+1, got, golden[0])
					}
					golden = golden[1:]
				}
				if q.Cached != cached {
					t.Errorf("prompt %d: %d cached tokens, vLLM has %d", i+1, q.Cached, cached)
				}
				before = q
			}
			if len(golden) > 0 {
				t.Errorf("%d batches are missing", len(golden))
			}
		})
	}
}

// readGroupBatches returns the payloads of a file of recorded events.
func readGroupBatches(t *testing.T, file string) (batches [][]byte) {
	t.Helper()
	text, err := os.ReadFile("../../kvevents/wire/testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if _, payload, found := strings.Cut(strings.TrimSpace(line), " "); found && line[0] != '#' {
			batch, err := hex.DecodeString(payload)
			if err != nil {
				t.Fatal(err)
			}
			batches = append(batches, batch)
		}
	}
	return batches
}

// newGoldenSequence returns the prompt of a session, whose full blocks are those that full attention has stored, after the
// blocks of the prompt before it that were cached. The prompt's length is not set.
func newGoldenSequence(t *testing.T, batches [][]byte, session string, before *sequence) *sequence {
	t.Helper()
	q := &sequence{}
	q.kvEvents.session = session
	for _, payload := range batches {
		_, events, _, err := decodeBatch(payload)
		if err != nil {
			t.Fatal(err)
		}
		for _, event := range events {
			if event["session_id"] != session || event["kv_cache_spec_kind"] != "full_attention" {
				continue
			}
			stored := engineEvent(t, event)
			if len(q.Blocks) == 0 && stored.Parent != 0 {
				known := slices.Index(before.Blocks, stored.Parent) + 1
				q.Blocks = slices.Clone(before.Blocks[:known])
				q.kvEvents.tokens = slices.Clone(before.kvEvents.tokens[:known*int(toUint(event["block_size"]))])
			}
			q.Blocks = append(q.Blocks, stored.Hashes...)
			for _, token := range event["token_ids"].([]any) {
				q.kvEvents.tokens = append(q.kvEvents.tokens, uint32(toUint(token)))
			}
		}
	}
	q.Owner = q
	return q
}
