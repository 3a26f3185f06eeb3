package router

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/index"
	"warmroute/router/prompt"
)

// part is what a snapshot holds of one backend. Its bytes are
//
//	address      uvarint length, bytes
//	taken        int64, ms since 1970
//	load         see appendLoad
//	lessons      see lessons.append
//	blocks       uvarint number; for each, the latest used first, its hash in
//	             8 bytes and a uvarint: how many blocks before it in this list
//	             its predecessor stands, 0 for a first block
//
// numbers little-endian. A block comes after its predecessor, so the list
// cannot name one that is not held.
type part struct {
	address string
	taken   time.Time
	load    backends.Load // only what tells one cache from another
	lessons []byte        // what was learned
	list    []byte        // the blocks
	count   int
	raw     []byte // all of it; list is its end
}

var errSnapshotShort = errors.New("it is damaged: a part ends too soon")

// contradicted says why a backend's cache is not the one that p tells of, going
// by its first scrape, or "".
func (p *part) contradicted(l *backends.Load) string {
	then := &p.load
	sameProcess := then.StartTime != 0 && then.StartTime == l.StartTime
	older := then.StartTime == 0 && l.StartTime != 0 && l.StartTime < float64(p.taken.Unix())
	counted := l.TokensKnown && then.TokensKnown && then.PromptTokens > 0
	switch {
	case l.Asleep:
		return "the engine is asleep"
	case l.PrefixCachingOff:
		return "the replica caches no prefixes"
	case l.StartTime != 0 && !sameProcess && !older:
		return "the process started anew"
	case counted && (l.PromptTokens < then.PromptTokens || l.GenerationTokens < then.GenerationTokens):
		return "a counter ran backwards"
	case !sameProcess && !older && !counted:
		return "nothing shows that its process is older than the snapshot"
	case l.CacheTokens != then.CacheTokens:
		return fmt.Sprintf("the cache changed from %d to %d tokens", then.CacheTokens, l.CacheTokens)
	case l.CacheTokens > 0 && l.PrefixKnown && then.PrefixKnown &&
		(l.PrefixQueries-l.PrefixHits)-(then.PrefixQueries-then.PrefixHits) > float64(l.CacheTokens):
		return "the replica has computed more since then than its cache holds"
	}
	return ""
}

// encode appends p's bytes with what was learned and what was copied of the index.
func (p *part) encode(to []byte, learned *lessons, copied []index.ExportedBlock) []byte {
	to = binary.AppendUvarint(to, uint64(len(p.address)))
	to = append(to, p.address...)
	to = binary.LittleEndian.AppendUint64(to, uint64(p.taken.UnixMilli()))
	to = appendLoad(to, &p.load)
	to = learned.append(to)
	count := len(to)
	to = append(to, make([]byte, 8)...) // a number of fixed length: it is not known yet
	var n uint64
	to, n = appendBlocks(to, copied)
	binary.LittleEndian.PutUint64(to[count:], n)
	return to
}

// appendBlocks writes the blocks in the order of their use, and before each
// what it stands on. Blocks whose predecessor was evicted, or moved, while they
// were copied are left out.
func appendBlocks(to []byte, copied []index.ExportedBlock) ([]byte, uint64) {
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
			to = binary.AppendUvarint(to, uint64(back))
		}
	}
	return to, uint64(n)
}

// parsePart checks all of a part, so that nothing can fail when it is used.
func parsePart(raw []byte) (*part, error) {
	p := &part{raw: raw}
	n, size := binary.Uvarint(raw)
	if size <= 0 || n > uint64(len(raw)-size) {
		return nil, errSnapshotShort
	}
	p.address, raw = string(raw[size:size+int(n)]), raw[size+int(n):]
	if len(raw) < 8+loadBytes+8*lessonNumbers+8 {
		return nil, errSnapshotShort
	}
	p.taken = time.UnixMilli(int64(binary.LittleEndian.Uint64(raw)))
	p.load = readLoad(raw[8:])
	raw = raw[8+loadBytes:]
	p.lessons, raw = raw[:8*lessonNumbers], raw[8*lessonNumbers:]
	count := binary.LittleEndian.Uint64(raw)
	p.list = raw[8:]
	if count > uint64(len(p.list)/9) || count > math.MaxInt32 { // a block takes 9 bytes at least
		return nil, errSnapshotShort
	}
	p.count = int(count)
	rest := p.list
	for i := range count {
		if len(rest) < 9 {
			return nil, errSnapshotShort
		}
		back, size := binary.Uvarint(rest[8:])
		if size <= 0 || back > i {
			return nil, errors.New("it is damaged: a block follows one that is not there")
		}
		rest = rest[8+size:]
	}
	if len(rest) > 0 {
		return nil, errors.New("it is damaged: a part goes on after its end")
	}
	return p, nil
}

// clone returns a copy that shares no memory with p.
func (p *part) clone() *part {
	c := *p
	c.raw = bytes.Clone(p.raw)
	list := len(c.raw) - len(p.list)
	c.list = c.raw[list:]
	c.lessons = c.raw[list-8-len(p.lessons) : list-8] // the number of blocks is between them
	return &c
}

// blocks lists what the backend held, in the order that index.Import takes.
func (p *part) blocks() []index.ImportedBlock {
	all := make([]index.ImportedBlock, p.count)
	rest := p.list
	for i := range all {
		back, size := binary.Uvarint(rest[8:])
		b := index.ImportedBlock{Block: prompt.Block(binary.LittleEndian.Uint64(rest)), First: back == 0}
		if back > 0 {
			b.Parent = all[i-int(back)].Block
		}
		all[i], rest = b, rest[8+size:]
	}
	return all
}

// loadBytes is the length of a load in a snapshot: six numbers and two flags.
const loadBytes = 6*8 + 2

// appendLoad writes what tells one cache, or one process, from another.
func appendLoad(to []byte, l *backends.Load) []byte {
	for _, x := range []float64{
		l.StartTime, float64(l.CacheTokens),
		l.PromptTokens, l.GenerationTokens, l.PrefixQueries, l.PrefixHits,
	} {
		to = binary.LittleEndian.AppendUint64(to, math.Float64bits(x))
	}
	return append(to, flag(l.TokensKnown), flag(l.PrefixKnown))
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// readLoad reads loadBytes bytes.
func readLoad(from []byte) backends.Load {
	next := func() float64 {
		x := math.Float64frombits(binary.LittleEndian.Uint64(from))
		from = from[8:]
		return x
	}
	l := backends.Load{StartTime: next(), CacheTokens: int(next())}
	l.PromptTokens, l.GenerationTokens, l.PrefixQueries, l.PrefixHits = next(), next(), next(), next()
	l.TokensKnown, l.PrefixKnown = from[0] == 1, from[1] == 1
	return l
}
