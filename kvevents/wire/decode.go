package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"
)

const (
	maxEvents       = 1 << 16 // of one batch
	maxHashes       = 1 << 20 // of one event
	maxRank         = 1<<16 - 1
	maxGroup        = 1<<16 - 1
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

// decoder decodes batches into memory that it uses again. The zero decoder is ready.
type decoder struct {
	msgpackReader
	batch    Batch
	hashes   []uint64 // of all events of the batch
	tokens   []uint32
	extra    []uint64
	interned map[string]string
}

// decode decodes the payload of one message. The batch is valid until the next call. An error
// means that the payload is not a batch or exceeds a bound; unknown events and fields are not
// errors.
func (d *decoder) decode(payload []byte) (*Batch, error) {
	d.msgpackReader = msgpackReader{rest: payload}
	d.reset()
	if isMap(d.peek()) {
		d.mapBatch()
	} else {
		d.arrayBatch()
	}
	if d.err == nil && len(d.rest) > 0 {
		d.fail("%d bytes follow the batch", len(d.rest))
	}
	if d.err != nil {
		return nil, fmt.Errorf("decode batch: %w", d.err)
	}
	return &d.batch, nil
}

// arrayBatch decodes a batch as vLLM sends it: time, events, and perhaps the rank and more.
func (d *decoder) arrayBatch() {
	n := d.arrayLen()
	if d.err == nil && n < 2 {
		d.fail("an array of %d elements", n)
	}
	d.skip(batchDepth)
	d.events()
	if n > 2 {
		d.rank()
	}
	for i := 3; i < n && d.err == nil; i++ {
		d.skip(batchDepth)
	}
}

// mapBatch decodes a batch that is a map, as its events are from vLLM 0.24.
func (d *decoder) mapBatch() {
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		switch string(d.key(batchDepth)) {
		case "events":
			d.events()
		case "data_parallel_rank":
			d.rank()
		default:
			d.skip(batchDepth)
		}
	}
}

func (d *decoder) rank() {
	if !d.isNil() {
		d.batch.Rank = d.count(maxRank)
	}
}

func (d *decoder) events() {
	n := d.arrayLen()
	if n+len(d.batch.Events) > maxEvents {
		d.fail("%d events, the limit is %d", n, maxEvents)
	}
	for i := 0; i < n && d.err == nil; i++ {
		if d.event(); d.err != nil {
			d.err = fmt.Errorf("event %d: %w", i, d.err)
		}
	}
}

// key returns the next key of a map, nil if it is not a string.
func (d *decoder) key(depth int) []byte {
	if isBytes(d.peek()) {
		return d.bytes()
	}
	d.skip(depth)
	return nil
}

// reset empties the batch and releases buffers that an unusually large batch has grown.
func (d *decoder) reset() {
	clear(d.batch.Events) // releases what they refer to
	d.batch.Rank = -1
	d.batch.Events = emptied(d.batch.Events, maxKeptEvents)
	d.hashes, d.tokens, d.extra = emptied(d.hashes, maxKeptValues), emptied(d.tokens, maxKeptValues), emptied(d.extra, maxKeptValues)
}

// emptied returns s without elements, and without its memory if that has room for more than limit.
func emptied[T any](s []T, limit int) []T {
	if cap(s) > limit {
		return nil
	}
	return s[:0]
}

// field is a field of an event.
type field uint8

const (
	fieldUnknown field = iota
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldSpecKind
	fieldSlidingWindow
	fieldLocality
	fieldOwnership
	fieldSession
)

// fieldNamed returns the field of an event that is a map.
func fieldNamed(name []byte) field {
	switch string(name) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpecKind
	case "locality":
		return fieldLocality
	case "session_id":
		return fieldSession
	}
	return fieldUnknown
}

// fieldAt returns the field at a place after the tag of an event that is an array.
func fieldAt(kind Kind, i int) field {
	var fields []field
	switch kind {
	case Stored:
		fields = []field{fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID, fieldMedium, fieldLoRAName, fieldExtraKeys,
			fieldGroup, fieldSpecKind, fieldSlidingWindow, fieldLocality, fieldOwnership, fieldSession}
	case Removed:
		fields = []field{fieldHashes, fieldMedium, fieldGroup, fieldLocality, fieldOwnership}
	}
	if i < len(fields) {
		return fields[i]
	}
	return fieldUnknown
}

func kindNamed(tag []byte) (kind Kind, ok bool) {
	switch string(tag) {
	case "BlockStored":
		return Stored, true
	case "BlockRemoved":
		return Removed, true
	case "AllBlocksCleared":
		return Cleared, true
	}
	return 0, false
}

// event decodes the next event and appends it, if its type is known.
func (d *decoder) event() {
	switch lead := d.peek(); {
	case isArray(lead):
		d.arrayEvent()
	case isMap(lead):
		d.mapEvent()
	default:
		d.fail("expected a map or an array, found a value of type %#x", lead)
	}
}

// arrayEvent decodes an event as vLLM before 0.24 sends it: its type, then its fields in order.
func (d *decoder) arrayEvent() {
	whole := d.msgpackReader
	n := d.arrayLen()
	var tag []byte
	if n > 0 && isBytes(d.peek()) {
		tag = d.bytes()
	}
	kind, ok := kindNamed(tag)
	if !ok {
		d.msgpackReader = whole
		d.skip(eventDepth)
		return
	}
	e := d.newEvent(kind)
	for i := 0; i < n-1 && d.err == nil; i++ {
		d.field(e, fieldAt(kind, i))
	}
}

// mapEvent decodes an event that is a map, its type under "type".
func (d *decoder) mapEvent() {
	whole := d.msgpackReader
	kind, ok := d.mapEventKind()
	d.msgpackReader = whole
	if !ok {
		d.skip(eventDepth)
		return
	}
	e := d.newEvent(kind)
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		d.field(e, fieldNamed(d.key(fieldDepth)))
	}
}

// mapEventKind finds the type, mostly in the first pair.
func (d *decoder) mapEventKind() (kind Kind, ok bool) {
	n := d.mapLen()
	for i := 0; i < n && d.err == nil; i++ {
		if string(d.key(fieldDepth)) == "type" && isBytes(d.peek()) {
			return kindNamed(d.bytes())
		}
		d.skip(fieldDepth)
	}
	return 0, false
}

func (d *decoder) newEvent(kind Kind) *Event {
	d.batch.Events = append(d.batch.Events, Event{Kind: kind})
	return &d.batch.Events[len(d.batch.Events)-1]
}

// field decodes the next value into a field of e. Nil is as good as no value.
func (d *decoder) field(e *Event, f field) {
	if f != fieldUnknown && d.isNil() {
		return
	}
	switch f {
	default:
		d.skip(fieldDepth)
	case fieldHashes:
		e.Hashes = d.hashList()
	case fieldParent:
		e.Parent, e.HasParent = d.hash(), true
	case fieldTokens:
		start := len(d.tokens)
		d.tokens = d.appendTokens(d.tokens)
		e.Tokens = slices.Clip(d.tokens[start:])
	case fieldBlockSize:
		e.BlockSize = d.count(maxBlockSize)
	case fieldLoRAID:
		// The name, which follows, replaces it. Without a name, the adapter must not be taken
		// for the base model.
		if id := strconv.AppendUint([]byte("#"), d.integer(), 10); e.LoRA == "" {
			e.LoRA = d.intern(id)
		}
	case fieldLoRAName:
		switch name := d.bytes(); {
		case len(name) > maxNameBytes:
			d.fail("a LoRA name of %d bytes, the limit is %d", len(name), maxNameBytes)
		case len(name) > 0:
			e.LoRA = d.intern(name)
		}
	case fieldMedium:
		e.Medium = mediumNamed(d.bytes())
	case fieldExtraKeys:
		e.Extra = d.extraKeysList()
	case fieldGroup:
		e.Group = d.count(maxGroup)
	case fieldSpecKind:
		e.SpecKind = specKindNamed(d.bytes())
	case fieldLocality:
		e.Remote = string(d.bytes()) == "REMOTE"
	case fieldSession:
		if id := d.bytes(); len(id) <= maxSessionBytes {
			e.Session = d.intern(id)
		}
	}
}

// hashList decodes the hashes of an event's blocks.
func (d *decoder) hashList() []uint64 {
	n := d.arrayLen()
	if n > maxHashes {
		d.fail("%d block hashes, the limit is %d", n, maxHashes)
	}
	start := len(d.hashes)
	for i := 0; i < n && d.err == nil; i++ {
		d.hashes = append(d.hashes, d.hash())
	}
	return slices.Clip(d.hashes[start:])
}

// hash decodes a block hash, an integer or bytes, of which the last eight count.
func (d *decoder) hash() uint64 {
	if b := d.rest; len(b) >= 9 && b[0] == msgUint64 {
		d.rest = b[9:]
		return binary.BigEndian.Uint64(b[1:])
	}
	if !isBytes(d.peek()) {
		return d.integer()
	}
	b := d.bytes()
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

func mediumNamed(name []byte) Medium {
	switch string(name) {
	case "GPU", "gpu", "":
		return GPU
	case "CPU", "cpu":
		return CPU
	}
	return Storage
}

func specKindNamed(name []byte) SpecKind {
	switch string(name) {
	case "":
		return SpecUnknown
	case "full_attention":
		return SpecFullAttention
	case "mla_attention":
		return SpecMLAAttention
	case "sliding_window":
		return SpecSlidingWindow
	case "sliding_window_mla":
		return SpecSlidingWindowMLA
	case "mamba":
		return SpecMamba
	case "chunked_local_attention":
		return SpecChunkedLocalAttention
	case "sink_full_attention":
		return SpecSinkFullAttention
	case "encoder_only_attention":
		return SpecEncoderOnlyAttention
	case "cross_attention":
		return SpecCrossAttention
	}
	return SpecOther
}

// extraKeysList decodes the extra keys of an event's blocks into one hash each.
func (d *decoder) extraKeysList() []uint64 {
	n := d.arrayLen()
	if n > maxHashes {
		d.fail("extra keys of %d blocks, the limit is %d", n, maxHashes)
	}
	start := len(d.extra)
	var any uint64
	for i := 0; i < n && d.err == nil; i++ {
		h := d.extraKeys()
		d.extra = append(d.extra, h)
		any |= h
	}
	if any == 0 {
		d.extra = d.extra[:start]
		return nil
	}
	return slices.Clip(d.extra[start:])
}

// HashExtraKeys returns what Event.Extra has for a block whose hash contains these strings, in
// this order, besides its tokens. It is 0 for none, and never 0 otherwise.
func HashExtraKeys(keys ...string) uint64 {
	var h uint64
	for _, key := range keys {
		h = hashExtraKey(h, extraBytes, []byte(key))
	}
	return nonZero(h, len(keys))
}

func nonZero(h uint64, keys int) uint64 {
	if keys > 0 && h == 0 {
		return 1
	}
	return h
}

// The kinds of extra keys, which differ in their hash.
const (
	extraBytes   = iota + 1 // strings are as good as bytes
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

// extraKeys decodes the extra keys of one block: a list, nil for none, or a single key.
func (d *decoder) extraKeys() uint64 {
	n := 1
	if lead := d.peek(); lead == msgNil || isArray(lead) {
		n = d.arrayLen()
	}
	var h uint64
	for i := 0; i < n && d.err == nil; i++ {
		h = d.extraKey(h, fieldDepth-2)
	}
	return nonZero(h, n)
}

// extraKey decodes one key, which may be a list, and continues the hash of those before it.
func (d *decoder) extraKey(h uint64, depth int) uint64 {
	switch lead := d.peek(); {
	case isBytes(lead):
		return hashExtraKey(h, extraBytes, d.bytes())
	case isInteger(lead):
		return hashExtraNumber(h, extraInteger, d.integer())
	case lead == msgFloat32, lead == msgFloat64:
		return hashExtraNumber(h, extraFloat, math.Float64bits(d.float()))
	case isArray(lead) && depth > 0:
		n := d.arrayLen()
		h = hashExtraNumber(h, extraListBegin, uint64(n))
		for i := 0; i < n && d.err == nil; i++ {
			h = d.extraKey(h, depth-1)
		}
		return hashExtraKey(h, extraListEnd, nil)
	}
	raw := d.rest
	d.skip(depth)
	return hashExtraKey(h, extraOther, raw[:len(raw)-len(d.rest)])
}
