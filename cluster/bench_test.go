package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router"
)

// BenchmarkDecision goes from a body to a backend and to the end of the request, with what other
// proxies are told and without.
func BenchmarkDecision(b *testing.B) {
	for _, size := range []int{4 << 10, 32 << 10, 512 << 10} {
		for _, shared := range []bool{false, true} {
			b.Run(fmt.Sprintf("bytes=%d/shared=%v", size, shared), func(b *testing.B) {
				var list []*backends.Backend
				for i := range 8 {
					one := newBackend(b, fmt.Sprintf("http://10.0.0.%d:8000", i))
					one.Name, one.Slot = fmt.Sprint("b", i), i
					one.SetState(backends.Ready)
					list = append(list, one)
				}
				o := router.Options{
					Settings: router.Settings{Policy: "prefix", PollInterval: time.Second}, Backends: list, BlockBytes: 256, IndexMaxBytes: 1 << 26,
					Now: time.Now, Rand: rand.NewPCG(1, 1),
				}
				outbox := NewOutbox()
				if shared {
					o.Reporter = outbox
				}
				r, err := router.New(o)
				if err != nil {
					b.Fatal(err)
				}
				body, err := json.Marshal(map[string]any{"model": "sim", "stream": true, "messages": []map[string]string{
					{"role": "user", "content": strings.Repeat("The quick brown fox jumps over the lazy dog.\n", size/46)},
				}})
				if err != nil {
					b.Fatal(err)
				}
				var p prompt.Prompt
				var blocks []prompt.Block
				b.ReportAllocs()
				for b.Loop() {
					if err := p.Parse(prompt.Chat, body); err != nil {
						b.Fatal(err)
					}
					p.ApplyLayout(r.PromptLayout("sim"))
					blocks = p.AppendBlocks(blocks[:0], "sim", 256)
					d, err := r.Pick(context.Background(), &router.Request{Backends: list, Model: "sim", Blocks: blocks, Bytes: len(p.Text), Sequences: 1,
						Streams: true})
					if err != nil {
						b.Fatal(err)
					}
					d.RecordFirstEvent()
					d.Release(router.Outcome{End: router.Completed, OutputTokens: 100})
					if e := outbox.removeOldest(); e != nil {
						outbox.recycle(e)
					}
				}
			})
		}
	}
}

// BenchmarkApply reads and applies the messages of another proxy, of one request each.
func BenchmarkApply(b *testing.B) {
	for _, blocks := range []int{16, 128, 2048} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			var list []*backends.Backend
			for i := range 8 {
				one := newBackend(b, fmt.Sprintf("http://10.0.0.%d:8000", i))
				one.Name = fmt.Sprint("b", i)
				list = append(list, one)
			}
			registry, err := backends.NewRegistry(list)
			if err != nil {
				b.Fatal(err)
			}
			r, err := router.New(router.Options{
				Settings: router.Settings{Policy: "prefix", PollInterval: time.Second}, Backends: list, BlockBytes: 256, IndexMaxBytes: 1 << 26,
				Now: time.Now, Rand: rand.NewPCG(1, 1),
			})
			if err != nil {
				b.Fatal(err)
			}
			var messages [][]byte
			for i := range 256 {
				e := newEncoder(testAddress)
				events := sampleEvents(list[i%8])
				sent := &events[0]
				sent.ID, sent.TooLong, sent.Blocks = 7, false, make([]prompt.Block, blocks)
				for at := range sent.Blocks { // half of it is in all prompts
					sent.Blocks[at] = prompt.Block(1 + at)
					if at >= blocks/2 {
						sent.Blocks[at] += prompt.Block(1+i) << 32
					}
				}
				for k := range events {
					e.addEvent(&events[k])
				}
				messages = append(messages, e.message(messageHead{1, 2, 3, testTime}, authenticator{}))
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				_, rest, err := parseHead(messages[i%len(messages)], authenticator{})
				if err != nil {
					b.Fatal(err)
				}
				updates, err := parseUpdates(rest, registry.FindAddress)
				if err != nil {
					b.Fatal(err)
				}
				var events []router.PlacementEvent
				for k := range updates {
					events = append(events, updates[k].event)
				}
				r.ApplyPlacements(1, events, 0)
			}
		})
	}
}
