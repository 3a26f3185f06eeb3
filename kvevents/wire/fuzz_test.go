package wire

import (
	"fmt"
	"net"
	"slices"
	"testing"
)

// FuzzDecodeBatch checks the bounds of what is decoded, that a used decoder decodes like a new
// one, and that no batch continues another.
func FuzzDecodeBatch(f *testing.F) {
	for _, payload := range capturedPayloads(f) {
		f.Add(payload)
	}
	f.Add(packBatch([]any{"BlockStored", list("hash"), nil, list(1, 70000), 2, 1, "CPU", "adapter",
		[]any{[]any{"adapter", []any{"image", 3}, 1.5}}}, []any{"AllBlocksCleared"}))
	f.Add(packBatch(pairs{"type", "New", "a", []any{nil, true, raw{0xd4, 1, 2}, raw{0xc7, 1, 1, 0}}}))
	f.Add(pack([]any{1, []any{}, nil, "new"}))
	var used decoder
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d decoder
		events, err := d.decode(payload)
		again, errAgain := used.decode(payload)
		if (err == nil) != (errAgain == nil) {
			t.Fatalf("a new decoder: %v, a used one: %v", err, errAgain)
		}
		if err != nil {
			return
		}
		if fmt.Sprint(events) != fmt.Sprint(again) {
			t.Fatalf("a new decoder: %+v\na used one: %+v", events, again)
		}
		values := 0
		for _, e := range events {
			values += len(e.Hashes) + len(e.Tokens) + len(e.Extra)
			if len(e.Hashes) > maxHashes || e.Kind > Cleared {
				t.Fatalf("event %+v", e)
			}
			if e.BlockSize < 0 || e.BlockSize > maxBlockSize || e.Group < 0 || e.Group > maxGroup || len(e.LoRA) > maxNameBytes ||
				len(e.Session) > maxSessionBytes {
				t.Fatalf("event %+v", e)
			}
		}
		if len(events) > maxEvents || len(events)+values > len(payload) {
			t.Fatalf("%d events, %d values from %d bytes", len(events), values, len(payload))
		}
		if _, err := used.decode(append(slices.Clone(payload), 0)); err == nil {
			t.Fatal("no error with a byte behind the batch")
		}
		if _, err := used.decode(payload[:len(payload)-1]); err == nil {
			t.Fatal("no error without the last byte")
		}
	})
}

// FuzzParseSources checks that the endpoints of all sources are valid, and that the sources are in order of rank.
func FuzzParseSources(f *testing.F) {
	f.Add([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://0.0.0.0:6557",`+
		`"topic":"kv"}}`), false)
	f.Add([]byte(`[{"data_parallel_rank":4,"endpoint":"tcp://[::]:5557","replay_endpoint":"ipc:///tmp/a"},{"endpoint":"tcp://:::5557"}]`),
		false)
	f.Add([]byte(`[{"endpoint":"tcp://localhost:5557"}]`), true)
	f.Fuzz(func(t *testing.T, body []byte, local bool) {
		host := "fd00::5"
		if local {
			host = "localhost"
		}
		sources, _ := ParseSources(body, host, Ports{5557, 2})
		last := -1
		for _, s := range sources {
			if s.Rank <= last || s.Rank > maxRank {
				t.Fatalf("rank %d follows %d", s.Rank, last)
			}
			last = s.Rank
			for _, endpoint := range []string{s.Endpoint, s.Replay} {
				if endpoint == "" { // no replay endpoint, or a publisher that connects
					continue
				}
				if again, err := resolveEndpoint(endpoint, host, 0); err != nil || again != endpoint {
					t.Fatalf("endpoint %q is resolved to %q, %v", endpoint, again, err)
				}
			}
		}
	})
}

// FuzzParseMessage parses frames of any content, as those of live events and as those of a replay.
func FuzzParseMessage(f *testing.F) {
	f.Add([]byte(""), []byte("kv"), []byte("\x00\x00\x00\x00\x00\x00\x00\x07"), []byte("abc"), uint8(4))
	f.Add([]byte("kv"), []byte("\x80\x00\x00\x00\x00\x00\x00\x07publisher"), []byte("abc"), []byte(nil), uint8(3))
	f.Add([]byte(""), []byte(""), replayEnd, []byte(nil), uint8(4))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, n uint8) {
		frames := [][]byte{a, b, c, d}[:min(n, 4)]
		if m, err := parseLive(frames); err == nil && m.sequence>>63 != 0 {
			t.Fatalf("sequence %d", m.sequence)
		}
		if m, end, err := parseReplay(frames); err == nil && m.sequence>>63 != 0 || err != nil && end {
			t.Fatalf("sequence %d, end %v, error %v", m.sequence, end, err)
		}
	})
}

// FuzzParseTopic checks that a topic that is built from what was parsed means the same.
func FuzzParseTopic(f *testing.F) {
	for _, text := range []string{"kv@10.0.0.5@qwen", "kv@10.0.0.5:8000@Qwen/Qwen3@main", "kv@[fd00::5]:8000@m", "kv@fd00::5@m",
		"kv@::ffff:10.0.0.5@m", "kv@Replica-A:http@m", "kv@@m", "kv-events"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		topic, err := ParseTopic(text)
		if err != nil {
			return
		}
		if len(text) > MaxTopicBytes || topic.Host == "" || topic.Model == "" {
			t.Fatalf("%q: %+v", text, topic)
		}
		address := topic.Host
		if topic.Port != "" {
			address = net.JoinHostPort(topic.Host, topic.Port)
		}
		rebuilt := "kv@" + address + "@" + topic.Model
		if again, err := ParseTopic(rebuilt); len(rebuilt) <= MaxTopicBytes && (err != nil || again != topic) {
			t.Fatalf("%q: %+v, then %+v, %v", text, topic, again, err)
		}
	})
}
