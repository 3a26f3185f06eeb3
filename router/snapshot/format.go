package snapshot

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/atomicfile"
	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/wire"
)

// A snapshot is, in numbers little-endian,
//
//	magic        16 bytes
//	version      uint32
//	fingerprint  uint64, see HashingFingerprint
//	parts        uint32, how many
//	responses    uint32 length, bytes: see responseindex.Index.AppendTo
//	each part    uint32 length, bytes: see part
//	checksum     uint64, xxh3 of all before it
//
// It holds hashes of prompts, by which a guessed one can be confirmed: keep it from strangers.
const (
	magic         = "warmroute index\n"
	formatVersion = 3
	oldestVersion = 2 // that can be read: without checkpoints
	headBytes     = len(magic) + 4 + 8 + 4
	maxParts      = 1 << 16

	// maxAge is how old one may be. Its backends' counters tell better
	// what it is worth; this bounds what is kept for one that has none.
	maxAge = 24 * time.Hour
)

// HashingFingerprint returns another number when blocks of equal prompts are other hashes: for another size of
// blocks, and when the way from a body to its canonical prompt changes in what these samples hold.
func HashingFingerprint(blockBytes int) uint64 {
	const chat = `{"model":"m","messages":[{"role":"system","content":"Be brief.\n\u00e9\ud83d\ude00"},` +
		`{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"},{"type":"image_url",` +
		`"image_url":{"url":"data:image/png;base64,AA=="}}]},` +
		`{"role":"assistant","reasoning":"hm","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f",` +
		`"arguments":"{\"a\": 1}"}}]},` +
		`{"role":"tool","tool_call_id":"c1","content":"three"},{"role":"user","name":"n","content":"four"}],` +
		`"tools":[{"type":"function","function":{"parameters":{"type":"object", "properties":{}},"name":"f","description":"d"}}]}`
	samples := []struct {
		kind prompt.Kind
		body string
	}{
		{prompt.Chat, chat},
		{prompt.Chat, `{"messages":[{"role":"user","content":"seeds and so on, more than a block"}],"cache_salt":"s",` +
			`"chat_template_kwargs":{"a":1}}`},
		{prompt.Messages, `{"model":"m","system":[{"type":"text","text":"Be brief."}],"messages":[{"role":"user","content":"one"},` +
			`{"role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"two"},{"type":"tool_use","id":"c1",` +
			`"name":"f","input":{"a":1}}]},` +
			`{"role":"user","content":[{"type":"tool_result","tool_use_id":"c1","content":[{"type":"text","text":"three"}]},{"type":"text",` +
			`"text":"four"}]}],` +
			`"tools":[{"name":"f","description":"d","input_schema":{"type":"object"}}]}`},
		{prompt.Responses, `{"model":"m","instructions":"Be brief.","input":[{"role":"user","content":"one"},{"type":"reasoning",` +
			`"content":[{"type":"reasoning_text","text":"hm"}]},` +
			`{"type":"function_call","call_id":"c1","name":"f","arguments":"{\"a\": 1}"},{"type":"function_call_output","call_id":"c1",` +
			`"output":"two"}],` +
			`"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"}}]}`},
		{prompt.Completion, `{"model":"m","prompt":"a text as it is, longer than a block"}`},
		{prompt.Completion, `{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10,11,12]}`},
		{prompt.Generate, `{"model":"m","token_ids":[1,2,3,4,5,6,7,8,9,10,11,12],"features":{"mm_hashes":{"image":["a"]}},"cache_salt":"s"}`},
	}
	const fine = 16 // bytes a block, so that little of a sample's end is left out
	sum := binary.LittleEndian.AppendUint64(nil, uint64(blockBytes))
	var p prompt.Prompt
	for _, s := range samples {
		// A sample that is refused one day has no blocks, which is a change too.
		_ = p.Parse(s.kind, []byte(s.body))
		p.ApplyLayout(prompt.DefaultLayout)
		for _, b := range p.AppendBlocks(nil, "m", fine) {
			sum = binary.LittleEndian.AppendUint64(sum, uint64(b))
		}
	}
	return xxh3.Hash(sum)
}

// writer writes the frame around parts. The first error stays.
type writer struct {
	to  io.Writer
	sum *xxh3.Hasher
	err error
}

// startSnapshot writes the head of a snapshot and returns the writer of the parts.
func startSnapshot(to io.Writer, fingerprint uint64, partCount int, responses []byte) *writer {
	w := &writer{to: to, sum: xxh3.New()}
	head := binary.LittleEndian.AppendUint32([]byte(magic), formatVersion)
	head = binary.LittleEndian.AppendUint64(head, fingerprint)
	w.write(binary.LittleEndian.AppendUint32(head, uint32(partCount)))
	w.writePart(responses)
	return w
}

func (w *writer) write(b []byte) {
	if w.err == nil {
		w.sum.Write(b)
		_, w.err = w.to.Write(b)
	}
}

func (w *writer) writePart(b []byte) {
	if len(b) > math.MaxUint32 && w.err == nil {
		w.err = errors.New("part of one backend exceeds 4 GiB: lower index.max_bytes")
	}
	w.write(binary.LittleEndian.AppendUint32(nil, uint32(len(b))))
	w.write(b)
}

func (w *writer) writeChecksum() error {
	w.write(binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))
	return w.err
}

// CheckReplaceable returns an error unless the file at path may be replaced by a
// snapshot: it is one, perhaps damaged or of another version, or it is empty or absent.
func CheckReplaceable(path string) error {
	return atomicfile.CheckMark(path, magic, "a warmroute snapshot")
}

// mayBeSnapshot reports whether a file that begins with head is a snapshot, perhaps
// damaged or of another version, or empty.
func mayBeSnapshot(head []byte) bool {
	n := min(len(head), len(magic))
	return string(head[:n]) == magic[:n]
}

// frame is an undamaged snapshot whose parts are not parsed. It aliases the file's data.
type frame struct {
	version     uint32
	fingerprint uint64
	partCount   uint32
	responses   []byte
	parts       []byte
}

func parseFrame(data []byte) (f frame, err error) {
	if !mayBeSnapshot(data) {
		return f, errors.New("not a warmroute snapshot")
	}
	if len(data) < headBytes+8 {
		return f, errors.New("snapshot is damaged: truncated")
	}
	head := data[len(magic):]
	version := binary.LittleEndian.Uint32(head)
	if version < oldestVersion || version > formatVersion {
		return f, fmt.Errorf("snapshot has format version %d, expected %d", version, formatVersion)
	}
	end := len(data) - 8
	if binary.LittleEndian.Uint64(data[end:]) != xxh3.Hash(data[:end]) {
		return f, errors.New("snapshot is damaged: wrong checksum")
	}
	f = frame{version: version, fingerprint: binary.LittleEndian.Uint64(head[4:]), partCount: binary.LittleEndian.Uint32(head[12:])}
	if f.partCount > maxParts {
		return f, fmt.Errorf("snapshot is damaged: %d parts", f.partCount)
	}
	f.responses, f.parts, err = cutPart(data[headBytes:end])
	return f, err
}

// cutPart returns the first of several parts, and what follows it.
func cutPart(parts []byte) (first, rest []byte, err error) {
	if len(parts) < 4 || uint64(binary.LittleEndian.Uint32(parts)) > uint64(len(parts)-4) {
		return nil, nil, errTruncated
	}
	n := 4 + int(binary.LittleEndian.Uint32(parts))
	return parts[4:n], parts[n:], nil
}

// parseParts returns the parts by address. They alias the frame.
func (f *frame) parseParts(wantFingerprint uint64, now time.Time) (byAddress map[string]*part, err error) {
	if f.fingerprint != wantFingerprint {
		return nil, errors.New("snapshot was written with another index.block_bytes, or by another version")
	}
	rest := f.parts
	parts := map[string]*part{}
	var newest time.Time
	for range f.partCount {
		var raw []byte
		if raw, rest, err = cutPart(rest); err != nil {
			return nil, err
		}
		p, err := parsePart(raw, f.version)
		if err != nil {
			return nil, err
		}
		if p.takenAt.After(newest) {
			newest = p.takenAt
		}
		if now.Sub(p.takenAt) <= maxAge {
			parts[p.address] = p
		}
	}
	switch {
	case len(rest) > 0:
		return nil, errors.New("snapshot is damaged: data after its last part")
	case len(parts) == 0 && f.partCount > 0:
		return nil, fmt.Errorf("snapshot is %v old, maximum is %v", now.Sub(newest).Round(time.Minute), maxAge)
	}
	return parts, nil
}

// part is what a snapshot holds of one backend: what code describes, and then the blocks up to
// the end. A block is its hash in 8 bytes, and a uvarint: twice how many blocks before it in the list its
// predecessor stands, 0 for a first block; one more if a uvarint follows that says how many tokens are before the
// checkpoint in the block. Version 2 has no checkpoints, and the first uvarint is not doubled. The blocks used last
// come first, but each after
// its predecessor, so the list cannot name one that is not held.
type part struct {
	address   string
	takenAt   time.Time
	load      backends.Load // only what tells one cache from another
	estimates []byte        // see estimate.Estimates.AppendBackend
	list      []byte        // the blocks
	count     int
	raw       []byte // all of it; list is its end
	version   uint32 // of the format
}

// code writes or reads all but the blocks.
func (p *part) code(c *wire.Coder) {
	c.Text(&p.address, wire.MaxNameBytes)
	takenAt := p.takenAt.UnixMilli()
	c.Varint(&takenAt)
	p.takenAt = time.UnixMilli(takenAt)
	l := &p.load
	cacheTokens := int64(l.CacheTokens)
	c.Varint(&cacheTokens)
	l.CacheTokens = int(cacheTokens)
	for _, x := range []*float64{&l.StartTime, &l.PromptTokens, &l.GenerationTokens, &l.PrefixQueries, &l.PrefixHits} {
		c.Float64(x)
	}
	c.Flags(&l.TokensKnown, &l.PrefixKnown)
	c.Bytes(&p.estimates, estimate.EncodedBytes)
}

var errTruncated = errors.New("snapshot is damaged: truncated part")

// mismatchReason returns why a backend's cache is not the one of p, judged by its first
// poll; "" when it may be.
func (p *part) mismatchReason(firstLoad *backends.Load) string {
	then := &p.load
	sameProcess := then.StartTime != 0 && then.StartTime == firstLoad.StartTime
	older := then.StartTime == 0 && firstLoad.StartTime != 0 && firstLoad.StartTime < float64(p.takenAt.Unix())
	counted := firstLoad.TokensKnown && then.TokensKnown && then.PromptTokens > 0
	switch {
	case firstLoad.Asleep:
		return "engine is asleep"
	case firstLoad.PrefixCachingOff:
		return "prefix caching is off"
	case firstLoad.StartTime != 0 && !sameProcess && !older:
		return "process restarted"
	case counted && (firstLoad.PromptTokens < then.PromptTokens || firstLoad.GenerationTokens < then.GenerationTokens):
		return "counter decreased"
	case !sameProcess && !older && !counted:
		return "cannot tell whether the process is older than the snapshot"
	case firstLoad.CacheTokens != then.CacheTokens:
		return fmt.Sprintf("cache size changed from %d to %d tokens", then.CacheTokens, firstLoad.CacheTokens)
	case firstLoad.CacheTokens > 0 && firstLoad.PrefixKnown && then.PrefixKnown &&
		(firstLoad.PrefixQueries-firstLoad.PrefixHits)-(then.PrefixQueries-then.PrefixHits) > float64(firstLoad.CacheTokens):
		return "replica has computed more since then than its cache holds"
	}
	return ""
}

func (p *part) appendTo(to []byte, blocks []index.ExportedBlock) (extended []byte) {
	c := wire.Coder{Data: to}
	p.code(&c)
	return appendBlocks(c.Data, blocks)
}

// appendBlocks writes the blocks in the order of their use, and before each what it stands on. Blocks whose
// predecessor was evicted, or moved, while they were copied are left out.
func appendBlocks(to []byte, copied []index.ExportedBlock) (extended []byte) {
	const unknown, leftOut = 0, math.MaxUint32
	number := make([]uint32, len(copied)) // in the list, from 1
	order := make([]int32, 0, len(copied))
	for place := range copied {
		if copied[place].Used != 0 {
			order = append(order, int32(place))
		}
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(copied[b].Used, copied[a].Used) })
	n := uint32(0)
	var above []int32 // places on the way to a first block, or to one that was written
	for _, place := range order {
		above = above[:0]
		for number[place] == unknown {
			above = append(above, place)
			number[place] = leftOut // until it is written; also ends a circle
			c := &copied[place]
			if c.ParentPlace == 0 {
				break
			}
			if int(c.ParentPlace) >= len(copied) || copied[c.ParentPlace].Used == 0 || copied[c.ParentPlace].Block != c.Parent {
				above = above[:0]
				break
			}
			place = c.ParentPlace
		}
		for _, at := range slices.Backward(above) {
			c, back := &copied[at], uint32(0)
			if c.ParentPlace != 0 {
				if number[c.ParentPlace] == leftOut {
					break
				}
				back = n + 1 - number[c.ParentPlace]
			}
			n++
			number[at] = n
			to = binary.LittleEndian.AppendUint64(to, uint64(c.Block))
			if c.Checkpoint > 0 {
				to = binary.AppendUvarint(to, 2*uint64(back)+1)
				to = binary.AppendUvarint(to, uint64(c.Checkpoint))
			} else {
				to = binary.AppendUvarint(to, 2*uint64(back))
			}
		}
	}
	return to
}

// parsePart checks all of a part, so that nothing can fail when it is used.
func parsePart(raw []byte, version uint32) (*part, error) {
	p := &part{raw: raw, version: version}
	c := wire.NewReader(raw)
	p.code(&c)
	p.list = c.Data
	for ; len(c.Data) > 0 && p.count < math.MaxInt32; p.count++ {
		var block, back, checkpoint uint64
		c.Uint64(&block)
		wire.Number(&c, &back, math.MaxUint64)
		if version > oldestVersion {
			if back&1 != 0 {
				wire.Number(&c, &checkpoint, math.MaxInt32)
			}
			back /= 2
		}
		if back > uint64(p.count) {
			return nil, errors.New("snapshot is damaged: missing predecessor of a block")
		}
		if c.Damaged() {
			break
		}
	}
	if c.Damaged() || len(c.Data) > 0 {
		return nil, errTruncated
	}
	return p, nil
}

// clone returns a copy in the present format that shares no memory with p.
func (p *part) clone() *part {
	raw := bytes.Clone(p.raw)
	if p.version < formatVersion {
		raw = raw[:len(raw)-len(p.list)]
		for rest := p.list; len(rest) > 0; {
			back, size := binary.Uvarint(rest[8:])
			raw = binary.AppendUvarint(append(raw, rest[:8]...), 2*back)
			rest = rest[8+size:]
		}
	}
	c, _ := parsePart(raw, formatVersion) // valid, as p is
	return c
}

// decodeBlocks lists what the backend held, in the order that index.Import takes.
func (p *part) decodeBlocks() []index.ImportedBlock {
	all := make([]index.ImportedBlock, p.count)
	rest := p.list
	for i := range all {
		b := index.ImportedBlock{Block: prompt.Block(binary.LittleEndian.Uint64(rest))}
		back, size := binary.Uvarint(rest[8:])
		rest = rest[8+size:]
		if p.version > oldestVersion {
			if back&1 != 0 {
				tokens, size := binary.Uvarint(rest)
				b.Checkpoint, rest = int(tokens), rest[size:]
			}
			back /= 2
		}
		if b.First = back == 0; !b.First {
			b.Parent = all[i-int(back)].Block
		}
		all[i] = b
	}
	return all
}
