package sim

import (
	"time"

	"github.com/tinylib/msgp/msgp"

	"warmroute/lab/sim/engine"
)

// kvEventContext is what the events about a sequence's blocks tell of the sequence.
type kvEventContext struct {
	tokens  []uint32 // of the prompt and the output
	adapter adapter  // zero: none
	salt    string
	session string
}

// appendBatch appends a batch as vLLM encodes it with msgpack: an array of the time, the events
// and the rank. Events are maps. Fields at their defaults are left out, as there.
func appendBatch(b []byte, now time.Time, events []engine.KVEvent, blockSize, rank int) []byte {
	b = msgp.AppendArrayHeader(b, 3)
	b = msgp.AppendFloat64(b, float64(now.UnixMicro())/1e6)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, event := range events {
		switch {
		case event.Kind == engine.CacheCleared:
			b = msgp.AppendMapHeader(b, 1)
			b = appendStringField(b, "type", "AllBlocksCleared")
		case event.Kind == engine.BlockRemoved:
			b = appendBlockRemoved(b, event)
		case event.Host:
			b = appendStoredOnHost(b, event)
		default:
			b = appendBlockStored(b, event, blockSize)
		}
	}
	return msgp.AppendInt(b, rank)
}

func appendBlockRemoved(b []byte, event engine.KVEvent) []byte {
	medium := "GPU"
	if event.Host {
		medium = "CPU"
	}
	b = msgp.AppendMapHeader(b, 4)
	b = appendStringField(b, "type", "BlockRemoved")
	b = appendHashes(b, event.Hashes)
	b = appendStringField(b, "medium", medium)
	return appendIntField(b, "group_idx", groupOf(event).Index)
}

// groupOf returns the group of an event; that of full attention if the model has no other.
func groupOf(event engine.KVEvent) engine.Group {
	if event.Group == nil {
		return engine.Group{}
	}
	return *event.Group
}

// appendStoredOnHost appends an event of vLLM's OffloadingConnector, which knows the hash of a
// block and nothing else.
func appendStoredOnHost(b []byte, event engine.KVEvent) []byte {
	b = msgp.AppendMapHeader(b, 9)
	b = appendStringField(b, "type", "BlockStored")
	b = appendHashes(b, event.Hashes)
	b = appendParent(b, 0)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), 0)
	b = appendIntField(b, "block_size", 0)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	b = appendStringField(b, "medium", "CPU")
	b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	return appendIntField(b, "group_idx", 0)
}

// kvCacheSpecKinds are vLLM's names of the kinds of groups.
var kvCacheSpecKinds = [...]string{engine.FullAttention: "full_attention", engine.State: "mamba", engine.SlidingWindow: "sliding_window"}

func appendBlockStored(b []byte, event engine.KVEvent, blockSize int) []byte {
	of := event.Request.Owner.(*sequence).kvEvents
	group := groupOf(event)
	fields := uint32(11)
	if group.Kind == engine.SlidingWindow {
		fields++
	}
	if of.session != "" {
		fields++
	}
	b = msgp.AppendMapHeader(b, fields)
	b = appendStringField(b, "type", "BlockStored")
	b = appendHashes(b, event.Hashes)
	b = appendParent(b, event.Parent)
	tokens := of.tokens[event.First*blockSize:][:(len(event.Hashes)+int(event.NotKept))*blockSize]
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, t)
	}
	b = appendIntField(b, "block_size", blockSize)
	if of.adapter.name == "" {
		b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
		b = appendStringField(b, "medium", "GPU")
		b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	} else {
		b = appendIntField(b, "lora_id", of.adapter.id)
		b = appendStringField(b, "medium", "GPU")
		b = appendStringField(b, "lora_name", of.adapter.name)
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(len(event.Hashes)))
	for i, h := range event.Hashes {
		b = of.appendExtraKeys(b, event.First+i == 0 && (event.NotKept == 0 || h == event.Request.Blocks[0]))
	}
	b = appendIntField(b, "group_idx", group.Index)
	b = appendStringField(b, "kv_cache_spec_kind", kvCacheSpecKinds[group.Kind])
	if group.Kind == engine.SlidingWindow {
		b = appendIntField(b, "kv_cache_spec_sliding_window", group.Window)
	}
	if of.session != "" {
		b = appendStringField(b, "session_id", of.session)
	}
	return b
}

// appendExtraKeys appends what a block's hash depends on besides tokens: the adapter, and the
// salt of the first block. Media are part of the tokens here.
func (c *kvEventContext) appendExtraKeys(b []byte, firstBlock bool) []byte {
	var keys []string
	if c.adapter.name != "" {
		keys = append(keys, c.adapter.name)
	}
	if c.salt != "" && firstBlock {
		keys = append(keys, c.salt)
	}
	if keys == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(keys)))
	for _, key := range keys {
		b = msgp.AppendString(b, key)
	}
	return b
}

func appendHashes(b []byte, hashes []engine.BlockHash) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, uint64(h))
	}
	return b
}

// appendParent appends the hash of the parent; nil if it is 0.
func appendParent(b []byte, parent engine.BlockHash) []byte {
	b = msgp.AppendString(b, "parent_block_hash")
	if parent == 0 {
		return msgp.AppendNil(b)
	}
	return msgp.AppendUint64(b, uint64(parent))
}

func appendStringField(b []byte, name, value string) []byte {
	return msgp.AppendString(msgp.AppendString(b, name), value)
}

// appendIntField appends a field that is not negative: vLLM sends the unsigned type.
func appendIntField(b []byte, name string, value int) []byte {
	return msgp.AppendUint64(msgp.AppendString(b, name), uint64(value))
}
