package router

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/queue"
)

// benchmarkLine is as prose and code are: a line break for every 60 bytes or so, and quotes now and then.
const benchmarkLine = "The quick brown fox jumps over the lazy dog, and then it goes\n" +
	"on to the next line of its \"story\", as foxes do; the dog has\nslept through all of it.\n"

// chatBody is a conversation of about size bytes, as an SDK would write it.
func chatBody(size int) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var messages []message
	roles := []string{"system", "user", "assistant"}
	for n := 0; n < size; {
		text := strings.Repeat(benchmarkLine, min(40, (size-n)/len(benchmarkLine)+1)) + fmt.Sprint(len(messages))
		messages = append(messages, message{roles[min(len(messages), 1+len(messages)%2)], text})
		n += len(text) + 40
	}
	body, err := json.Marshal(map[string]any{"model": "sim", "messages": messages, "stream": true, "temperature": 0.7})
	if err != nil {
		panic(err)
	}
	return body
}

// messagesBody is a turn of a coding agent of about size bytes, with the members in its order: most
// of it are the results of tools.
func messagesBody(size int) []byte {
	text := func(n int) string {
		quoted, _ := json.Marshal(strings.Repeat(benchmarkLine, n/len(benchmarkLine)+1))
		return string(quoted)
	}
	var body strings.Builder
	fmt.Fprintf(&body, `{"model":"sim","max_tokens":32000,"stream":true,"system":[{"type":"text","text":%s}],"messages":[{"role":"user",`+
		`"content":"go"}`, text(size/8))
	for i := range 40 {
		fmt.Fprintf(&body, `,{"role":"assistant","content":[{"type":"text","text":%s},{"type":"tool_use","id":"toolu_%d","name":"Read",`+
			`"input":{"file_path":"/src/main.go"}}]}`, text(200), i)
		fmt.Fprintf(&body, `,{"role":"user","content":[{"tool_use_id":"toolu_%d","type":"tool_result","content":%s}]}`, i, text(size/50))
	}
	body.WriteString("]}")
	return []byte(body.String())
}

var benchmarkBodies = []struct {
	kind prompt.Kind
	size int
	body func(size int) []byte
}{
	{prompt.Chat, 32 << 10, chatBody},
	{prompt.Chat, 512 << 10, chatBody},
	{prompt.Messages, 200 << 10, messagesBody},
}

// BenchmarkDecision goes from the bytes of a body to the chosen backend and back
// to a released reservation, with every prompt known to half of the fleet.
// lab/bench/decision prints it as a multiple of BenchmarkChainedXXH3. 200 KB are Messages, the
// others chats.
func BenchmarkDecision(b *testing.B) {
	for _, c := range benchmarkBodies {
		for _, n := range []int{8, 64} {
			b.Run(fmt.Sprintf("bytes=%d/backends=%d", c.size, n), func(b *testing.B) {
				r, fleet, _ := newFleet(b, n, "prefix")
				body := c.body(c.size)
				var p prompt.Prompt
				var blocks []prompt.Block
				decide := func() *Reservation {
					if err := p.Parse(c.kind, body); err != nil {
						b.Fatal(err)
					}
					p.ApplyLayout(r.PromptLayout("sim"))
					blocks = p.AppendBlocks(blocks[:0], "sim", 256)
					return mustPick(b, r, &Request{
						Backends: fleet, Blocks: blocks, TextClass: p.TextClass(nil), Bytes: len(p.Text), Sequences: p.Sequences, Streams: p.Stream,
					})
				}
				for range n { // until half of the fleet holds the prompt
					d := decide()
					d.RecordFirstEvent()
					defer d.Release(Outcome{End: Completed, OutputTokens: 100})
				}
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					d := decide()
					d.RecordFirstEvent()
					d.Release(Outcome{End: Completed, OutputTokens: 100})
				}
			})
		}
	}
}

// BenchmarkChainedXXH3 is the least that any index of blocks has to do.
func BenchmarkChainedXXH3(b *testing.B) {
	for _, c := range benchmarkBodies {
		b.Run(fmt.Sprintf("bytes=%d", c.size), func(b *testing.B) {
			body := c.body(c.size)
			b.SetBytes(int64(len(body)))
			var seed uint64
			for b.Loop() {
				for at := 0; at+256 <= len(body); at += 256 {
					seed = xxh3.HashSeed(body[at:at+256], seed)
				}
			}
		})
	}
}

// BenchmarkDispatch is what it costs to bring one request through a queue that
// stays as long as it is: it is sent when another ends, and one more arrives.
// The time of a request must not grow with the queue.
func BenchmarkDispatch(b *testing.B) {
	for _, n := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("queued=%d", n), func(b *testing.B) {
			r, fleet, c := newFleet(b, 8, "prefix", func(o *Options) { o.Queue = QueueSettings{Requests: 2 * n} })
			var running []*Reservation
			key := 0
			arrive := func() {
				req := ask(fleet, key%5000, 20+key%100)
				key++
				r.Submit(req, func(d *Reservation, err error) {
					if err != nil {
						b.Fatal(err)
					}
					running = append(running, d)
				})
			}
			for r.CountWaiting() < n {
				arrive()
			}
			b.ReportAllocs()
			for b.Loop() {
				c.advance(50 * time.Millisecond)
				d := running[0]
				running = running[1:]
				d.RecordFirstEvent()
				d.Release(Outcome{End: Completed, OutputTokens: 100})
				for r.CountWaiting() < n {
					arrive()
				}
			}
		})
	}
}

// BenchmarkRound is one look at a queue from which nothing can go: queued
// conversations that one busy backend holds, and none of them in use. What it
// costs grows with the prompts of those alone that reserve the last room.
func BenchmarkRound(b *testing.B) {
	for _, n := range []int{16, 1600} {
		b.Run(fmt.Sprintf("blocks=%d", n), func(b *testing.B) {
			r, fleet, c := newFleet(b, 2, "prefix", withQueue, func(o *Options) { o.IndexMaxBytes = 1 << 30 })
			for _, to := range fleet {
				r.ObserveLoad(to, &backends.Load{CacheTokens: 20_000_000, PolledAt: c.now})
			}
			for key := range queue.MaxTurns {
				mustPick(b, r, ask(fleet[:1], 1000+key, n)).Release(Outcome{End: Completed})
				c.advance(time.Second)
			}
			mustPick(b, r, ask(fleet[:1], 1, 200))
			mustPick(b, r, ask(fleet[1:], 2, blocksFor(1)-1)) // a little room
			for key := range queue.MaxTurns {
				r.Submit(ask(fleet, 1000+key, n+5), func(*Reservation, error) { b.Fatal("not queued") })
			}
			for b.Loop() {
				r.Tick()
			}
		})
	}
}
