package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"
)

const (
	maxEvents       = 1 << 16 // of one batch
	maxHashes       = 1 << 20 // of one event
	maxGroup        = 1<<16 - 1
	maxWindow       = 1 << 30
	maxBlockSize    = 1 << 20
	maxNameBytes    = 1 << 10 // of a LoRA adapter's name
	maxSessionBytes = 128

	maxInterned   = 1 << 10 // strings that a decoder keeps for the next events
	maxKeptEvents = 1 << 12 // of the buffers between batches
	maxKeptValues = 1 << 16
)

// Levels of arrays and maps that may lie below those of the batch, its list of events, and an event.
const (
	batchDepth = maxDepth - 1
	eventDepth = maxDepth - 2
	fieldDepth = maxDepth - 3
)

// kinds are the types of events by their names.
var kinds = map[string]Kind{"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}

// arrayFields are the fields of events that are arrays, in their order after the type.
var arrayFields = map[Kind][]string{
	Stored: {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"},
	Removed: {"block_hashes", "medium", "group_idx", "locality", "ownership"},
}

// decoder decodes batches into memory that it uses again. The zero decoder is ready.
type decoder struct {
	msgpackReader
	events   []Event
	hashes   []uint64 // of all events of the batch
	tokens   []uint32
	extra    []uint64
	interned map[string]string
}

// decode decodes the payload of one message and returns the events of the batch, which are valid
// until the next call. An error means that the payload is not a batch or exceeds a bound; unknown
// events and fields are not errors.
func (d *decoder) decode(payload []byte) ([]Event, error) {
	d.msgpackReader = msgpackReader{rest: payload}
	d.reset()
	if d.nextType() == msgp.MapType {
		d.decodeMapBatch()
	} else {
		d.decodeArrayBatch()
	}
	if d.err == nil && len(d.rest) > 0 {
		d.fail("%d bytes follow the batch", len(d.rest))
	}
	if d.err != nil {
		return nil, fmt.Errorf("decode batch: %w", d.err)
	}
	return d.events, nil
}

// reset empties the batch and releases buffers that an unusually large batch has grown.
func (d *decoder) reset() {
	clear(d.events) // releases what they refer to
	d.events = emptied(d.events, maxKeptEvents)
	d.hashes, d.tokens, d.extra = emptied(d.hashes, maxKeptValues), emptied(d.tokens, maxKeptValues), emptied(d.extra, maxKeptValues)
}

// emptied returns s without elements, and without its memory if that has room for more than limit.
func emptied[T any](s []T, limit int) []T {
	if cap(s) > limit {
		return nil
	}
	return s[:0]
}

// decodeArrayBatch decodes a batch as vLLM sends it: time, events, and perhaps more.
func (d *decoder) decodeArrayBatch() {
	n := d.arrayLen()
	if d.err == nil && n < 2 {
		d.fail("an array of %d elements", n)
	}
	d.skip(batchDepth)
	d.decodeEvents()
	for i := 2; i < n && d.err == nil; i++ {
		d.skip(batchDepth)
	}
}

// decodeMapBatch decodes a batch that is a map, as its events are from vLLM 0.24.
func (d *decoder) decodeMapBatch() {
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		if string(d.key(batchDepth)) == "events" {
			d.decodeEvents()
		} else {
			d.skip(batchDepth)
		}
	}
}

// key returns the next key of a map, nil if it is not a string.
func (d *decoder) key(depth int) []byte {
	if d.isText() {
		return d.text()
	}
	d.skip(depth)
	return nil
}

func (d *decoder) decodeEvents() {
	n := d.arrayLen()
	if n+len(d.events) > maxEvents {
		d.fail("%d events, the limit is %d", n, maxEvents)
	}
	for i := 0; i < n && d.err == nil; i++ {
		switch t := d.nextType(); t {
		case msgp.ArrayType:
			d.decodeArrayEvent()
		case msgp.MapType:
			d.decodeMapEvent()
		default:
			d.fail("expected a map or an array, found %v", t)
		}
		if d.err != nil {
			d.err = fmt.Errorf("event %d: %w", i, d.err)
		}
	}
}

// decodeArrayEvent decodes an event as vLLM before 0.24 sends it, its type and its fields in order,
// and appends it, if its type is known.
func (d *decoder) decodeArrayEvent() {
	whole := d.msgpackReader
	n := d.arrayLen()
	var tag []byte
	if n > 0 && d.isText() {
		tag = d.text()
	}
	kind, known := kinds[string(tag)]
	if !known {
		d.msgpackReader = whole
		d.skip(eventDepth)
		return
	}
	e, fields := d.appendEvent(kind), arrayFields[kind]
	for i := 0; i < n-1 && d.err == nil; i++ {
		if i < len(fields) {
			d.decodeField(e, fields[i])
		} else {
			d.skip(fieldDepth)
		}
	}
}

// decodeMapEvent decodes an event that is a map, its type under "type", and appends it, if its type is known.
func (d *decoder) decodeMapEvent() {
	whole := d.msgpackReader
	kind, known := d.findKind()
	d.msgpackReader = whole
	if !known {
		d.skip(eventDepth)
		return
	}
	e := d.appendEvent(kind)
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		d.decodeField(e, string(d.key(fieldDepth)))
	}
}

// findKind finds the type of an event that is a map, mostly in the first pair.
func (d *decoder) findKind() (kind Kind, known bool) {
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		if string(d.key(fieldDepth)) == "type" && d.isText() {
			kind, known = kinds[string(d.text())]
			return kind, known
		}
		d.skip(fieldDepth)
	}
	return 0, false
}

func (d *decoder) appendEvent(kind Kind) *Event {
	d.events = append(d.events, Event{Kind: kind})
	return &d.events[len(d.events)-1]
}

// decodeField decodes the next value into a field of e. Nil is as good as no value.
func (d *decoder) decodeField(e *Event, name string) {
	if d.isNil() {
		return
	}
	switch name {
	default:
		d.skip(fieldDepth)
	case "block_hashes":
		e.Hashes = d.decodeHashes()
	case "parent_block_hash":
		e.Parent, e.HasParent = d.decodeHash(), true
	case "token_ids":
		start := len(d.tokens)
		for n := d.arrayLen(); n > 0 && d.err == nil; n-- {
			d.tokens = append(d.tokens, uint32(d.integer()))
		}
		e.Tokens = slices.Clip(d.tokens[start:])
	case "block_size":
		e.BlockSize = d.count(maxBlockSize)
	case "lora_id":
		// The name, which follows, replaces it. Without a name, the adapter must not be taken
		// for the base model.
		if id := strconv.AppendUint([]byte("#"), d.integer(), 10); e.LoRA == "" {
			e.LoRA = d.intern(id)
		}
	case "lora_name":
		switch name := d.text(); {
		case len(name) > maxNameBytes:
			d.fail("a LoRA name of %d bytes, the limit is %d", len(name), maxNameBytes)
		case len(name) > 0:
			e.LoRA = d.intern(name)
		}
	case "medium":
		switch string(d.text()) {
		case "GPU", "gpu", "":
		default:
			e.Offloaded = true
		}
	case "extra_keys":
		e.Extra = d.decodeExtraKeys()
	case "group_idx":
		e.Group = d.count(maxGroup)
	case "kv_cache_spec_kind":
		switch string(d.text()) {
		case "full_attention", "mla_attention", "sink_full_attention", "":
		default:
			e.NoPrefix = true
		}
	case "kv_cache_spec_sliding_window":
		e.Window = d.count(maxWindow)
	case "locality":
		e.Remote = string(d.text()) == "REMOTE"
	case "session_id":
		if id := d.text(); len(id) <= maxSessionBytes {
			e.Session = d.intern(id)
		}
	}
}

// decodeHashes decodes the hashes of an event's blocks.
func (d *decoder) decodeHashes() []uint64 {
	n := d.arrayLen()
	if n > maxHashes {
		d.fail("%d block hashes, the limit is %d", n, maxHashes)
	}
	start := len(d.hashes)
	for i := 0; i < n && d.err == nil; i++ {
		d.hashes = append(d.hashes, d.decodeHash())
	}
	return slices.Clip(d.hashes[start:])
}

// decodeHash decodes a block hash, an integer or bytes, of which the last eight count.
func (d *decoder) decodeHash() uint64 {
	if !d.isText() {
		return d.integer()
	}
	b := d.text()
	if len(b) == 0 {
		d.fail("an empty block hash")
	}
	var h uint64
	for _, c := range b[max(0, len(b)-8):] {
		h = h<<8 | uint64(c)
	}
	return h
}

// intern returns b as a string, mostly one that was made before.
func (d *decoder) intern(b []byte) string {
	if s, ok := d.interned[string(b)]; ok {
		return s
	}
	if d.interned == nil || len(d.interned) == maxInterned {
		d.interned = make(map[string]string)
	}
	s := string(b)
	d.interned[s] = s
	return s
}

// decodeExtraKeys decodes the extra keys of an event's blocks into one hash each.
func (d *decoder) decodeExtraKeys() []uint64 {
	n := d.arrayLen()
	if n > maxHashes {
		d.fail("extra keys of %d blocks, the limit is %d", n, maxHashes)
	}
	start := len(d.extra)
	var any uint64
	for i := 0; i < n && d.err == nil; i++ {
		h := d.hashExtraKeys()
		d.extra = append(d.extra, h)
		any |= h
	}
	if any == 0 {
		d.extra = d.extra[:start]
		return nil
	}
	return slices.Clip(d.extra[start:])
}

// The kinds of extra keys, which differ in their hash.
const (
	extraText    = iota + 1 // strings are as good as bytes
	extraInteger            // of any width
	extraFloat
	extraListBegin
	extraListEnd
	extraOther // as it was sent
)

// hashExtraKey continues the hash of the keys before.
func hashExtraKey(before uint64, kind uint64, key []byte) uint64 {
	return xxh3.HashSeed(key, before+kind)
}

func hashExtraNumber(before uint64, kind uint64, bits uint64) uint64 {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], bits)
	return hashExtraKey(before, kind, b[:])
}

// hashExtraKeys decodes the extra keys of one block: a list, nil for none, or a single key. The hash
// is 0 for none, and never 0 otherwise.
func (d *decoder) hashExtraKeys() (h uint64) {
	n := 1
	if t := d.nextType(); t == msgp.NilType || t == msgp.ArrayType {
		n = d.arrayLen()
	}
	for i := 0; i < n && d.err == nil; i++ {
		h = d.hashNextExtraKey(h, fieldDepth-2)
	}
	if n > 0 {
		h = max(h, 1)
	}
	return h
}

// hashNextExtraKey decodes one key, which may be a list, and continues the hash of those before it.
func (d *decoder) hashNextExtraKey(h uint64, depth int) uint64 {
	switch t := d.nextType(); {
	case t == msgp.StrType, t == msgp.BinType:
		return hashExtraKey(h, extraText, d.text())
	case t == msgp.IntType, t == msgp.UintType:
		return hashExtraNumber(h, extraInteger, d.integer())
	case t == msgp.Float32Type, t == msgp.Float64Type:
		return hashExtraNumber(h, extraFloat, math.Float64bits(read(&d.msgpackReader, msgp.ReadFloat64Bytes)))
	case t == msgp.ArrayType && depth > 0:
		n := d.arrayLen()
		h = hashExtraNumber(h, extraListBegin, uint64(n))
		for i := 0; i < n && d.err == nil; i++ {
			h = d.hashNextExtraKey(h, depth-1)
		}
		return hashExtraKey(h, extraListEnd, nil)
	}
	raw := d.rest
	d.skip(depth)
	return hashExtraKey(h, extraOther, raw[:len(raw)-len(d.rest)])
}
