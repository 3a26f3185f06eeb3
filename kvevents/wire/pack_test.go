package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"
)

// pairs is a map in the order of its keys and values, which alternate.
type pairs []any

// raw is a value that is packed already.
type raw []byte

// pack encodes values as MessagePack, each in the smallest encoding.
func pack(v any) []byte { return appendPacked(nil, v) }

func appendPacked(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, 0xc0)
	case raw:
		return append(b, v...)
	case bool:
		if v {
			return append(b, 0xc3)
		}
		return append(b, 0xc2)
	case int:
		if v < 0 {
			if v >= -32 {
				return append(b, byte(v))
			}
			return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(v))
		}
		return appendPacked(b, uint64(v))
	case uint64:
		switch {
		case v < 0x80:
			return append(b, byte(v))
		case v < 1<<8:
			return append(b, 0xcc, byte(v))
		case v < 1<<16:
			return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
		case v < 1<<32:
			return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
		}
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	case float64:
		return binary.BigEndian.AppendUint64(append(b, 0xcb), math.Float64bits(v))
	case string:
		return append(appendLength(b, len(v), 0xa0, 31, 0xda, 0xdb), v...)
	case []byte:
		return append(binary.BigEndian.AppendUint16(append(b, 0xc5), uint16(len(v))), v...)
	case []any:
		b = appendLength(b, len(v), 0x90, 15, 0xdc, 0xdd)
		for _, e := range v {
			b = appendPacked(b, e)
		}
		return b
	case pairs:
		b = appendLength(b, len(v)/2, 0x80, 15, 0xde, 0xdf)
		for _, e := range v {
			b = appendPacked(b, e)
		}
		return b
	}
	panic(fmt.Sprintf("pack: %T", v))
}

func appendLength(b []byte, n int, fixed byte, maxFixed int, lead16, lead32 byte) []byte {
	switch {
	case n <= maxFixed:
		return append(b, fixed|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, lead16), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, lead32), uint32(n))
}

// packBatch encodes a batch of events as vLLM sends it.
func packBatch(events ...any) []byte { return pack([]any{1795199844.25, events, 0}) }

// list turns a slice into one that pack takes.
func list[T any](values ...T) []any {
	l := make([]any, len(values))
	for i, v := range values {
		l[i] = v
	}
	return l
}

// stored is a BlockStored event as vLLM 0.32 sends it.
func stored(parent any, hashes []any, tokens []any, blockSize int) pairs {
	return pairs{
		"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", parent, "token_ids", tokens, "block_size", blockSize,
		"lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", make([]any, len(hashes)), "group_idx", 0,
		"kv_cache_spec_kind", "full_attention",
	}
}

// decodeOne decodes a batch of one event.
func decodeOne(t *testing.T, event any) Event {
	t.Helper()
	var d decoder
	events, err := d.decode(packBatch(event))
	if err != nil {
		t.Fatal(err)
	}
	if len(events) != 1 {
		t.Fatalf("%d events", len(events))
	}
	return events[0]
}

// hashKeys returns what Event.Extra has for a block whose hash contains these strings, in this order,
// besides its tokens.
func hashKeys(keys ...string) uint64 {
	var h uint64
	for _, key := range keys {
		h = hashExtraKey(h, extraText, []byte(key))
	}
	return h
}
