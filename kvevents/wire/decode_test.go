package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// capturedPayloads returns the payloads that vLLM 0.32 sent.
func capturedPayloads(t testing.TB) [][]byte {
	t.Helper()
	text, err := os.ReadFile("testdata/events-0.32.txt")
	if err != nil {
		t.Fatal(err)
	}
	var payloads [][]byte
	frame := 0
	for line := range strings.Lines(string(text)) {
		frame++
		if strings.HasPrefix(line, "frames=") {
			frame = 0
		}
		if frame == 3 { // after topic and sequence
			payload, err := hex.DecodeString(strings.TrimSpace(line))
			if err != nil {
				t.Fatal(err)
			}
			payloads = append(payloads, payload)
		}
	}
	if len(payloads) != 4 {
		t.Fatalf("%d payloads in testdata", len(payloads))
	}
	return payloads
}

func TestDecodeCapturedEvents(t *testing.T) {
	var d decoder
	type summary struct {
		kind      Kind
		hashes    int
		first     uint64
		hasParent bool
		parent    uint64
		tokens    int
		lastToken uint32
		blockSize int
	}
	chain := summary{Stored, 11, 6963506914859854579, false, 0, 352, 16, 32}
	for i, want := range [][]summary{
		{chain},
		{{Stored, 1, 10242347920244126723, true, 2170022817268981876, 32, 4, 32}},
		{
			{kind: Removed, hashes: 1, first: 10242347920244126723},
			{kind: Removed, hashes: 1, first: 10242347920244126723},
			{kind: Removed, hashes: 1, first: 5143544948591665997},
			{Stored, 1, 12768854406399194492, true, 9501975504348185373, 32, 75, 32},
		},
		{{kind: Cleared}, chain},
	} {
		events, err := d.decode(capturedPayloads(t)[i])
		if err != nil {
			t.Fatal(err)
		}
		var got []summary
		for _, e := range events {
			s := summary{e.Kind, len(e.Hashes), 0, e.HasParent, e.Parent, len(e.Tokens), 0, e.BlockSize}
			if len(e.Hashes) > 0 {
				s.first = e.Hashes[0]
			}
			if len(e.Tokens) > 0 {
				s.lastToken = e.Tokens[len(e.Tokens)-1]
			}
			if e.Offloaded || e.NoPrefix || e.Group != 0 || e.Extra != nil || e.LoRA != "" || e.Session != "" || e.Remote {
				t.Errorf("batch %d: %+v", i, e)
			}
			got = append(got, s)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("batch %d:\ngot  %+v\nwant %+v", i, got, want)
		}
	}
}

func TestDecodeArraysAndMaps(t *testing.T) {
	var d decoder
	events, err := d.decode(pack([]any{1.5, []any{
		[]any{"BlockStored", list(1, 2), 7, list(10, 11, 12, 13), 2, nil, "CPU", "adapter", []any{[]any{"adapter"}, nil}, 3, "mamba", 5, "REMOTE",
			"tier", "s"},
		pairs{"type", "BlockStored", "session_id", "s", "ownership", "tier", "locality", "REMOTE", "kv_cache_spec_sliding_window", 5,
			"kv_cache_spec_kind", "mamba", "group_idx", 3,
			"extra_keys", []any{[]any{"adapter"}, nil}, "lora_name", "adapter", "medium", "CPU", "block_size", 2, "token_ids", list(10, 11, 12, 13),
			"parent_block_hash", 7, "block_hashes", list(1, 2)},
		[]any{"BlockRemoved", list(4), "disk", 3, "REMOTE", "tier"},
		pairs{"block_hashes", list(4), "locality", "REMOTE", "group_idx", 3, "medium", "disk", "type", "BlockRemoved"},
		[]any{"AllBlocksCleared"},
		pairs{"type", "AllBlocksCleared"},
		[]any{"BlockStored", list(1), nil, list(5), 1, nil}, // vLLM 0.9
		pairs{"type", "BlockStored", "block_hashes", list(1), "token_ids", list(5), "block_size", 1},
	}}))
	if err != nil {
		t.Fatal(err)
	}
	want := []Event{
		{Kind: Stored, Offloaded: true, NoPrefix: true, HasParent: true, Remote: true, Group: 3, Window: 5, Hashes: []uint64{1, 2}, Parent: 7,
			Tokens: []uint32{10, 11, 12, 13}, BlockSize: 2, Extra: []uint64{hashKeys("adapter"), 0}, LoRA: "adapter", Session: "s"},
		{Kind: Removed, Offloaded: true, Remote: true, Group: 3, Hashes: []uint64{4}},
		{Kind: Cleared},
		{Kind: Stored, Hashes: []uint64{1}, Tokens: []uint32{5}, BlockSize: 1},
	}
	if len(events) != 2*len(want) {
		t.Fatalf("%d events", len(events))
	}
	for i, e := range events {
		if !reflect.DeepEqual(e, want[i/2]) {
			t.Errorf("event %d:\ngot  %+v\nwant %+v", i, e, want[i/2])
		}
	}
}

func TestDecodeMapBatch(t *testing.T) {
	var d decoder
	events, err := d.decode(pack(pairs{"ts", 1.5, "data_parallel_rank", 3, 5, "new", "events", []any{pairs{"type", "AllBlocksCleared"}}}))
	if err != nil || len(events) != 1 || events[0].Kind != Cleared {
		t.Errorf("%+v, %v", events, err)
	}
}

func TestDecodeHashes(t *testing.T) {
	sha := bytes.Repeat([]byte{9}, 32)
	binary.BigEndian.PutUint64(sha[24:], 0x0123456789abcdef)
	for _, c := range []struct {
		packed any
		want   uint64
	}{
		{0, 0}, {127, 127}, {255, 255}, {65535, 65535}, {1 << 31, 1 << 31}, {uint64(1<<64 - 1), 1<<64 - 1},
		{-1, 1<<64 - 1}, {-1 << 40, 1<<64 - 1<<40},
		{raw{0xd0, 0x80}, 1<<64 - 128}, {raw{0xd1, 0xff, 0xfe}, 1<<64 - 2}, {raw{0xd2, 0, 0, 1, 0}, 256},
		{raw{0xcf, 0, 0, 0, 0, 0, 0, 0, 1}, 1},
		{sha, 0x0123456789abcdef}, {string(sha), 0x0123456789abcdef}, {[]byte{1, 2}, 0x0102},
	} {
		e := decodeOne(t, stored(c.packed, []any{c.packed, c.packed}, nil, 16))
		if !slices.Equal(e.Hashes, []uint64{c.want, c.want}) || !e.HasParent || e.Parent != c.want {
			t.Errorf("%v: hashes %#x, parent %#x", c.packed, e.Hashes, e.Parent)
		}
	}
}

func TestDecodeTokens(t *testing.T) {
	e := decodeOne(t,
		stored(nil, list(1), []any{0, 127, 128, 255, 256, 65535, 65536, uint64(1<<32 - 1), -1, raw{0xcf, 0, 0, 0, 1, 0, 0, 0, 2}}, 4))
	if want := []uint32{0, 127, 128, 255, 256, 65535, 65536, 1<<32 - 1, 1<<32 - 1, 2}; !slices.Equal(e.Tokens, want) {
		t.Errorf("tokens %v, want %v", e.Tokens, want)
	}
}

func TestDecodeExtraKeys(t *testing.T) {
	long := strings.Repeat("k", 300)
	extra := func(keys ...any) []uint64 {
		e := stored(nil, make([]any, 0), nil, 16)
		e[slices.Index(e, any("extra_keys"))+1] = keys
		return decodeOne(t, e).Extra
	}
	for _, c := range []struct {
		a, b any
		same bool
	}{
		{[]any{"salt"}, []any{[]byte("salt")}, true},
		{[]any{"salt"}, "salt", true},
		{[]any{long}, []any{[]byte(long)}, true},
		{[]any{[]any{"image", 3}}, []any{[]any{"image", raw{0xd3, 0, 0, 0, 0, 0, 0, 0, 3}}}, true},
		{[]any{[]any{"image", -3}}, []any{[]any{"image", raw{0xd1, 0xff, 0xfd}}}, true},
		{[]any{1.5}, []any{raw{0xca, 0x3f, 0xc0, 0, 0}}, true},
		{[]any{"salt"}, []any{"pepper"}, false},
		{[]any{"a", "b"}, []any{"b", "a"}, false},
		{[]any{"a", "b"}, []any{"ab"}, false},
		{[]any{"a", "b"}, []any{[]any{"a", "b"}}, false},
		{[]any{[]any{"image", 3}}, []any{[]any{"image", 4}}, false},
		{[]any{[]any{"a"}, "b"}, []any{[]any{"a", "b"}}, false},
		{[]any{"1"}, []any{1}, false},
		{[]any{true}, []any{false}, false},
		{[]any{nil}, nil, false},
		{[]any{pairs{"a", 1}}, []any{pairs{"a", 2}}, false},
	} {
		got := extra(c.a, c.b, []any{"other"})
		if len(got) != 3 || (got[0] == got[1]) != c.same {
			t.Errorf("%v and %v: hashes %x", c.a, c.b, got)
		}
	}
	if got, want := extra(nil, []any{}, []any{"adapter", "salt"}), []uint64{0, 0, hashKeys("adapter", "salt")}; !slices.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
	if got := extra(nil, []any{}); got != nil {
		t.Errorf("hashes %x of no keys", got)
	}
}

func TestDecodeLoRA(t *testing.T) {
	for _, c := range []struct {
		event pairs
		want  string
	}{
		{pairs{"type", "BlockStored", "lora_id", 3, "lora_name", "adapter"}, "adapter"},
		{pairs{"type", "BlockStored", "lora_name", "adapter", "lora_id", 3}, "adapter"},
		{pairs{"type", "BlockStored", "lora_id", 3}, "#3"},
		{pairs{"type", "BlockStored", "lora_id", nil, "lora_name", nil}, ""},
		{pairs{"type", "BlockStored"}, ""},
	} {
		if e := decodeOne(t, c.event); e.LoRA != c.want {
			t.Errorf("%v: %q, want %q", c.event, e.LoRA, c.want)
		}
	}
}

func TestDecodeNames(t *testing.T) {
	for name, want := range map[string]bool{"": false, "GPU": false, "gpu": false, "CPU": true, "cpu": true, "STORAGE": true, "disk": true} {
		if e := decodeOne(t, pairs{"type", "BlockRemoved", "medium", name}); e.Offloaded != want {
			t.Errorf("medium %q: offloaded %v, want %v", name, e.Offloaded, want)
		}
	}
	for name, want := range map[string]bool{
		"": false, "full_attention": false, "mla_attention": false, "sink_full_attention": false,
		"sliding_window": true, "sliding_window_mla": true, "mamba": true, "chunked_local_attention": true,
		"encoder_only_attention": true, "cross_attention": true, "new_attention": true,
	} {
		if e := decodeOne(t, pairs{"type", "BlockStored", "kv_cache_spec_kind", name}); e.NoPrefix != want {
			t.Errorf("kind %q: no prefix %v, want %v", name, e.NoPrefix, want)
		}
	}
	if e := decodeOne(t, pairs{"type", "BlockStored", "session_id", strings.Repeat("s", maxSessionBytes+1), "locality",
		"LOCAL"}); e.Session != "" || e.Remote {
		t.Errorf("session %q, remote %v", e.Session, e.Remote)
	}
}

func TestDecodeUnknown(t *testing.T) {
	deep := any("end")
	for range maxDepth - 4 {
		deep = []any{deep}
	}
	values := []any{nil, true, 1, -500, 1.5, raw{0xca, 0, 0, 0, 0}, "text", []byte("bytes"), deep, pairs{"a", 1, 2, "b"},
		raw{0xd4, 1, 2}, raw{0xd8, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, raw{0xc7, 2, 1, 0, 0}, raw{0xc8, 0, 1, 1, 0},
		raw{0xc9, 0, 0, 0, 0, 1},
		raw(append([]byte{0xd9, 40}, make([]byte, 40)...)), raw(append([]byte{0xc6, 0, 0, 0, 40}, make([]byte, 40)...)),
		raw{0xdf, 0, 0, 0, 1, 1, 1}}
	known := pairs{"type", "BlockRemoved", "block_hashes", list(1)}
	asArray := []any{"BlockRemoved", list(1), nil, nil, nil, nil}
	events := []any{[]any{}, []any{1}, []any{nil, nil}, pairs{}, pairs{"type", 5}, pairs{1, 2, "type", "New"}, []any{"New", values}}
	for _, v := range values {
		known = append(known, "new_field", v)
		asArray = append(asArray, v)
		events = append(events, []any{"New", v}, pairs{"type", "New", "block_hashes", v})
	}
	known = append(known, 7, "a key that is not a string", "lookahead_token_ids", []any{list(1, 2), list(3)})
	var d decoder
	decoded, err := d.decode(pack([]any{nil, append(events, known, asArray), nil, "a new field", deep}))
	if err != nil {
		t.Fatal(err)
	}
	want := Event{Kind: Removed, Hashes: []uint64{1}}
	if !reflect.DeepEqual(decoded, []Event{want, want}) {
		t.Errorf("events %+v", decoded)
	}
}

func TestDecodeInvalid(t *testing.T) {
	deep := any(1)
	for range maxDepth - 2 {
		deep = []any{deep}
	}
	hashes := make([]any, maxHashes+1)
	for i := range hashes {
		hashes[i] = i
	}
	huge := raw{0xdd, 0xff, 0xff, 0xff, 0xff}
	event := func(name string, value any) []byte { return packBatch(pairs{"type", "BlockStored", name, value}) }
	for name, payload := range map[string][]byte{
		"empty":             {},
		"not an array":      pack("batch"),
		"a map of events":   pack(pairs{"events", pairs{}}),
		"too short":         pack([]any{1.5}),
		"events not a list": pack([]any{1.5, 1}),
		"event not a map":   packBatch(1),
		"trailing bytes":    append(packBatch(), 0),
		"invalid value":     packBatch(pairs{"type", "New", "a", raw{0xc1}}),
		"deep field":        event("new_field", deep),
		"deep event":        packBatch([]any{"New", deep}),
		"deep extra key":    event("extra_keys", []any{deep}),
		"deep key":          packBatch(pairs{deep, 1}),
		"many events":       packBatch(make([]any, maxEvents+1)...),
		"many hashes":       event("block_hashes", hashes),
		"many extra keys":   event("extra_keys", hashes),
		"huge batch":        pack(huge),
		"huge events":       pack([]any{1.5, huge}),
		"huge event":        packBatch(huge),
		"huge map":          packBatch(raw{0xdf, 0xff, 0xff, 0xff, 0xff}),
		"huge hashes":       event("block_hashes", huge),
		"huge tokens":       event("token_ids", huge),
		"huge string":       event("medium", raw{0xdb, 0xff, 0xff, 0xff, 0xff}),
		"huge extension":    event("new_field", raw{0xc9, 0xff, 0xff, 0xff, 0xff, 1}),
		"hash type":         event("block_hashes", list(1.5)),
		"empty hash":        event("block_hashes", list("")),
		"token type":        event("token_ids", list("a")),
		"block size":        event("block_size", maxBlockSize+1),
		"negative size":     event("block_size", -1),
		"group":             event("group_idx", maxGroup+1),
		"LoRA name":         event("lora_name", strings.Repeat("n", maxNameBytes+1)),
		"medium type":       event("medium", 1),
	} {
		var d decoder
		if events, err := d.decode(payload); err == nil {
			t.Errorf("%s: no error, but %d events", name, len(events))
		}
	}
}

func TestDecodeTruncated(t *testing.T) {
	for _, payload := range capturedPayloads(t) {
		var d decoder
		for n := range payload {
			if _, err := d.decode(payload[:n]); err == nil {
				t.Fatalf("no error for %d of %d bytes", n, len(payload))
			}
		}
	}
}

func TestDecodeReusesMemory(t *testing.T) {
	payload := benchmarkBatch(16, 3)
	var d decoder
	allocations := testing.AllocsPerRun(100, func() {
		if _, err := d.decode(payload); err != nil {
			t.Fatal(err)
		}
	})
	if allocations > 0 {
		t.Errorf("%v allocations a batch", allocations)
	}
	big := stored(nil, nil, make([]any, maxKeptValues+1), 16)
	for i := range maxKeptValues + 1 {
		big[slices.Index(big, any("token_ids"))+1].([]any)[i] = 1
	}
	if _, err := d.decode(packBatch(big)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.decode(payload); err != nil {
		t.Fatal(err)
	}
	if cap(d.tokens) > maxKeptValues {
		t.Errorf("a buffer of %d tokens is kept", cap(d.tokens))
	}
}

func TestDecodeManyNames(t *testing.T) {
	var d decoder
	for i := range 3 * maxInterned {
		name := "adapter-" + strings.Repeat("x", i%7) + string(rune('a'+i%26)) + hex.EncodeToString([]byte{byte(i >> 8), byte(i)})
		events, err := d.decode(packBatch(pairs{"type", "BlockStored", "lora_name", name}))
		if err != nil {
			t.Fatal(err)
		}
		if events[0].LoRA != name || len(d.interned) > maxInterned {
			t.Fatalf("name %q, %d strings kept", events[0].LoRA, len(d.interned))
		}
	}
}

// benchmarkBatch is one of a scheduler step: events of a few blocks with parent and session.
func benchmarkBatch(events, blocks int) []byte {
	all := make([]any, events)
	for i := range all {
		hashes, tokens := make([]any, blocks), make([]any, 16*blocks)
		for j := range hashes {
			hashes[j] = uint64(i*blocks+j)*0x9e3779b97f4a7c15 | 1<<63
		}
		for j := range tokens {
			tokens[j] = (i*7919 + j*104729) % 128_000
		}
		all[i] = append(stored(uint64(i)*0xc2b2ae3d27d4eb4f|1<<63, hashes, tokens, 16), "session_id", "session-of-a-user-0123")
	}
	return packBatch(all...)
}

func BenchmarkDecode(b *testing.B) {
	const events = 16
	for _, blocks := range []int{1, 3, 32} { // of each event
		b.Run(strconv.Itoa(blocks), func(b *testing.B) {
			payload := benchmarkBatch(events, blocks)
			var d decoder
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := d.decode(payload); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*events*blocks), "ns/block")
		})
	}
}

// TestDecodeEventsOfGroups decodes what vLLM 0.32 sent with hybrid models. The lines before each payload describe its events.
func TestDecodeEventsOfGroups(t *testing.T) {
	for _, file := range []string{"testdata/groups-0.32-mamba.txt", "testdata/groups-0.32-sliding-window.txt"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d decoder
		var want []string
		payloads := 0
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			if description, comment := strings.CutPrefix(line, "#    BlockStored "); comment {
				want = append(want, description)
			}
			if strings.HasPrefix(line, "#") {
				continue
			}
			_, encoded, _ := strings.Cut(line, " ")
			payload, err := hex.DecodeString(encoded)
			if err != nil {
				t.Fatal(err)
			}
			events, err := d.decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range events {
				if i >= len(want) || !strings.HasPrefix(want[i], fmt.Sprintf("group %d ", e.Group)) ||
					strings.Contains(want[i], "full_attention") == e.NoPrefix || !strings.HasSuffix(want[i], describeStored(&e)) {
					t.Errorf("%s: event %d of payload %d is %+v, want %q", file, i, payloads, e, want)
				}
			}
			if len(events) != len(want) {
				t.Errorf("%s: %d events in payload %d, want %d", file, len(events), payloads, len(want))
			}
			payloads++
			want = nil
		}
		if payloads < 3 {
			t.Errorf("%s has %d payloads", file, payloads)
		}
	}
}

// describeStored returns what the files say of stored blocks after their group: the last five digits of hashes.
func describeStored(e *Event) string {
	var hashes []string
	for _, h := range e.Hashes {
		hashes = append(hashes, fmt.Sprintf("'%05d'", h%100_000))
	}
	parent := "None"
	if e.HasParent {
		parent = fmt.Sprintf("%05d", e.Parent%100_000)
	}
	return fmt.Sprintf("block_size %d hashes [%s] parent %s tokens %d", e.BlockSize, strings.Join(hashes, ", "), parent, len(e.Tokens))
}
