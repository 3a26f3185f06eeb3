package kvevents

import (
	"testing"

	"warmroute/kvevents/wire"
)

// FuzzApply applies events that need not make sense. What they change must be consistent, and
// bounded.
func FuzzApply(f *testing.F) {
	f.Add([]byte("\x00\x00\x01\x04\x01\x02\x03\x01\x01\x03\x00\x02\x00"))
	f.Add([]byte("\x00\x00\x01\x01\x01\x07\x00\x00\x01\x01\x01\x07\x04\x00\x00\x05\x01\x03\x01\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		const maxBlocks = 20
		tr, h := newTracker(1, "our", 1, newRoom(maxBlocks)), holding{}
		next := func() byte {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return b
		}
		for len(data) > 0 {
			rank, op := int(next()%3)-1, next()
			switch op % 8 {
			case 0:
				h.apply(t, tr.restart(rank, op&8 > 0))
				continue
			case 1:
				tr.removeSequence("our"+string(rune('a'+next()%4)), 0)
				continue
			}
			e := wire.Event{Kind: wire.Kind(op % 4), Offloaded: op/8%2 > 0, NoPrefix: op/64 > 0, Group: int(op / 32 % 2), Window: int(op / 128 * 3)}
			if parent := next(); parent%4 > 0 {
				e.HasParent, e.Parent = true, uint64(parent%32)
			}
			for range next() % 5 {
				e.Hashes = append(e.Hashes, uint64(next()%32))
			}
			e.BlockSize = int(next()%4) - 1
			for range next() % 16 {
				e.Tokens = append(e.Tokens, uint32(next()))
			}
			e.Session = "our" + string(rune('a'+next()%4))
			h.apply(t, tr.apply(rank, []wire.Event{e}))
			if tr.blocks > maxBlocks || tr.places > maxBlocks || tr.places < 0 || len(h) > tr.blocks {
				t.Fatalf("%d blocks in %d places of %d; %d by the changes", tr.blocks, tr.places, maxBlocks, len(h))
			}
		}
		h.apply(t, tr.forgetAll())
		if tr.places != 0 || tr.blocks != 0 || len(h) != 0 {
			t.Errorf("%d places taken, %d blocks and %d by the changes after all was forgotten", tr.places, tr.blocks, len(h))
		}
	})
}
