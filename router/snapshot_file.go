package router

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/router/prompt"
)

// A snapshot is, in numbers little-endian,
//
//	magic        16 bytes
//	version      uint32
//	fingerprint  uint64, see fingerprint
//	parts        uint32, how many
//	each part    uint32 length, bytes: see part
//	checksum     uint64, xxh3 of all before it
//
// It holds hashes of prompts, by which a guessed one can be confirmed: keep it
// from strangers.
const (
	snapshotMagic   = "warmroute index\n"
	snapshotVersion = 1
	snapshotHead    = len(snapshotMagic) + 4 + 8 + 4
	mostParts       = 1 << 16

	// oldestSnapshot is how old one may be. Its backends' counters tell better
	// what it is worth; this bounds what is kept for one that has none.
	oldestSnapshot = 24 * time.Hour
)

// fingerprint is another number when blocks of equal prompts are other hashes:
// for another size of blocks, and when the way from a body to its canonical
// prompt changes in what these samples hold.
func fingerprint(blockBytes int) uint64 {
	const chat = `{"model":"m","messages":[{"role":"system","content":"Be brief.\n\u00e9\ud83d\ude00"},` +
		`{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]},` +
		`{"role":"assistant","reasoning":"hm","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}}]},` +
		`{"role":"tool","tool_call_id":"c1","content":"three"},{"role":"user","name":"n","content":"four"}],` +
		`"tools":[{"type":"function","function":{"parameters":{"type":"object", "properties":{}},"name":"f","description":"d"}}]}`
	samples := []struct {
		kind prompt.Kind
		body string
	}{
		{prompt.Chat, chat},
		{prompt.Chat, `{"messages":[{"role":"user","content":"seeds and so on, more than a block"}],"cache_salt":"s","chat_template_kwargs":{"a":1}}`},
		{prompt.Completion, `{"model":"m","prompt":"a text as it is, longer than a block"}`},
		{prompt.Completion, `{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10,11,12]}`},
	}
	const fine = 16 // bytes a block, so that little of a sample's end is left out
	sum := binary.LittleEndian.AppendUint64(nil, uint64(blockBytes))
	var p prompt.Prompt
	for _, s := range samples {
		// A sample that is refused one day has no blocks, which is a change too.
		_ = p.Parse(s.kind, []byte(s.body))
		for _, b := range p.Blocks(nil, "m", fine) {
			sum = binary.LittleEndian.AppendUint64(sum, uint64(b))
		}
	}
	return xxh3.Hash(sum)
}

// snapshotWriter writes the frame around parts. The first error stays.
type snapshotWriter struct {
	to  io.Writer
	sum *xxh3.Hasher
	err error
}

func newSnapshotWriter(to io.Writer, fingerprint uint64, parts int) *snapshotWriter {
	w := &snapshotWriter{to: to, sum: xxh3.New()}
	head := binary.LittleEndian.AppendUint32([]byte(snapshotMagic), snapshotVersion)
	head = binary.LittleEndian.AppendUint64(head, fingerprint)
	w.write(binary.LittleEndian.AppendUint32(head, uint32(parts)))
	return w
}

func (w *snapshotWriter) write(b []byte) {
	if w.err == nil {
		w.sum.Write(b)
		_, w.err = w.to.Write(b)
	}
}

func (w *snapshotWriter) part(b []byte) {
	if len(b) > math.MaxUint32 && w.err == nil {
		w.err = errors.New("one backend's part is larger than 4 GiB; lower index.max_bytes")
	}
	w.write(binary.LittleEndian.AppendUint32(nil, uint32(len(b))))
	w.write(b)
}

func (w *snapshotWriter) end() error {
	w.write(binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))
	return w.err
}

// BeginsSnapshot says whether a file that begins with head is a snapshot, damaged
// or of another version perhaps, or holds nothing yet.
func BeginsSnapshot(head []byte) bool {
	n := min(len(head), len(snapshotMagic))
	return string(head[:n]) == snapshotMagic[:n]
}

// parseSnapshot returns the parts by address. They alias data.
func parseSnapshot(data []byte, want uint64, now time.Time) (map[string]*part, error) {
	if !BeginsSnapshot(data) {
		return nil, errors.New("it is no snapshot of warmroute's")
	}
	if len(data) < snapshotHead+8 {
		return nil, errors.New("it is damaged: it ends too soon")
	}
	rest := data[len(snapshotMagic):]
	if v := binary.LittleEndian.Uint32(rest); v != snapshotVersion {
		return nil, fmt.Errorf("it has version %d of the format, this program reads %d", v, snapshotVersion)
	}
	end := len(data) - 8
	if binary.LittleEndian.Uint64(data[end:]) != xxh3.Hash(data[:end]) {
		return nil, errors.New("it is damaged: the checksum is wrong")
	}
	if binary.LittleEndian.Uint64(rest[4:]) != want {
		return nil, errors.New("its blocks were made with another index.block_bytes, or by another version")
	}
	count := binary.LittleEndian.Uint32(rest[12:])
	if count > mostParts {
		return nil, fmt.Errorf("it is damaged: %d parts", count)
	}
	rest = data[snapshotHead:end]
	parts := map[string]*part{}
	var newest time.Time
	for range count {
		if len(rest) < 4 || uint64(binary.LittleEndian.Uint32(rest)) > uint64(len(rest)-4) {
			return nil, errSnapshotShort
		}
		n := int(binary.LittleEndian.Uint32(rest))
		p, err := parsePart(rest[4 : 4+n])
		if err != nil {
			return nil, err
		}
		rest = rest[4+n:]
		if p.taken.After(newest) {
			newest = p.taken
		}
		if now.Sub(p.taken) <= oldestSnapshot {
			parts[p.address] = p
		}
	}
	switch {
	case len(rest) > 0:
		return nil, errors.New("it is damaged: it goes on after its last part")
	case len(parts) == 0 && count > 0:
		return nil, fmt.Errorf("it is %v old; %v is the most", now.Sub(newest).Round(time.Minute), oldestSnapshot)
	}
	return parts, nil
}
