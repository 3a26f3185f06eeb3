package wire

import (
	"context"
	"encoding/binary"
	"sync/atomic"
	"testing"
)

// countingHandler counts blocks and cancels when all have arrived.
type countingHandler struct {
	blocks, want atomic.Int64
	done         chan struct{}
}

func (*countingHandler) Restart(int, bool) {}

func (h *countingHandler) Apply(_ int, events []Event) {
	n := 0
	for i := range events {
		n += len(events[i].Hashes)
	}
	if h.blocks.Add(int64(n)) == h.want.Load() {
		close(h.done)
	}
}

// BenchmarkSubscriber receives batches of a scheduler step over loopback. The sender's writes
// are included.
func BenchmarkSubscriber(b *testing.B) {
	const events, blocks = 16, 3
	payload := benchmarkBatch(events, blocks)
	ln := listen(b, "127.0.0.1:0")
	defer ln.Close()
	h := &countingHandler{done: make(chan struct{})}
	h.want.Store(int64(b.N) * events * blocks)
	s := &Subscriber{Source: Source{Endpoint: "tcp://" + ln.Addr().String()}, Handler: h}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); s.Run(ctx) }()
	conn, err := ln.Accept()
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if err := newPeer(conn).greet("PUB"); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if _, err := conn.Write(packMessage([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, uint64(i)), payload)); err != nil {
			b.Fatal(err)
		}
	}
	<-h.done
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/events/blocks, "ns/block")
	cancel()
	<-ended
}
