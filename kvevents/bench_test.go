package kvevents

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"warmroute/kvevents/wire"
	"warmroute/prompt"
	"warmroute/router"
)

// BenchmarkKVEvents applies events of 40 replicas, each with a cache of its own: from the decoded
// batch to the index.
func BenchmarkKVEvents(b *testing.B) {
	const replicas, perBatch, held = 40, 4, 20_000
	x := newUnread(b, replicas, 1<<30)
	x.follow()
	var events []wire.Event
	tokens := make([]uint32, perBatch*testKVTokens)
	hashes, gone := make([]uint64, perBatch), make([]uint64, perBatch)
	blocks := 0
	b.ResetTimer()
	for n := uint64(1); b.Loop(); n += perBatch {
		for i := range hashes {
			hashes[i], gone[perBatch-1-i] = n+uint64(i), n+uint64(i)-held
			tokens[i*testKVTokens] = uint32(n) + uint32(i)
		}
		events = append(events[:0], wire.Event{Kind: wire.Stored, Hashes: hashes, Tokens: tokens, BlockSize: testKVTokens})
		if n > held {
			events = append(events, wire.Event{Kind: wire.Removed, Hashes: gone})
		}
		for i, k := range x.replicas {
			tokens[1] = uint32(i)
			k.follower.Apply(0, events)
		}
		blocks += replicas * perBatch
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(blocks), "ns/block")
}

// BenchmarkDecision goes from the bytes of a chat to the chosen backend and back to a released
// reservation, half of the backends holding the prompt: without KV events, and with those of all
// backends, what Settle does included.
func BenchmarkDecision(b *testing.B) {
	for _, size := range []int{32 << 10, 512 << 10} {
		for _, n := range []int{8, 64} {
			for _, events := range []bool{false, true} {
				b.Run(fmt.Sprintf("bytes=%d/backends=%d/events=%v", size, n, events), func(b *testing.B) {
					x := newUnread(b, n, 1<<26)
					if events {
						x.follow()
					}
					benchmarkDecision(b, x, size)
				})
			}
		}
	}
}

func benchmarkDecision(b *testing.B, x *fixture, size int) {
	text := bytes.Repeat([]byte("The quick brown fox jumps over the lazy dog.\\n"), size/46)
	body := slices.Concat([]byte(`{"model":"sim","stream":true,"messages":[{"role":"user","content":"`), text, []byte(`"}]}`))
	var p prompt.Prompt
	var blocks []prompt.Block
	decide := func() *router.Reservation {
		if err := p.Parse(prompt.Chat, body); err != nil {
			b.Fatal(err)
		}
		p.ApplyLayout(x.PromptLayout("sim"))
		blocks = p.AppendBlocks(blocks[:0], "sim", 256)
		return x.pick(&router.Request{
			Backends: x.backends, Blocks: blocks, TextClass: p.TextClass(nil), Bytes: len(p.Text), Sequences: p.Sequences, Streams: p.Stream,
		})
	}
	completed := router.Outcome{End: router.Completed, OutputTokens: 100}
	for range x.backends { // until half of them hold the prompt
		d := decide()
		if x.replicas != nil {
			x.replicas[d.Backend.Slot].compute(d.KVSession, 1, len(body)/4)
		}
		d.RecordFirstEvent()
		defer d.Release(completed)
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		d := decide()
		d.RecordFirstEvent()
		d.Release(completed)
		if i%100 == 0 {
			x.settle()
		}
	}
}
