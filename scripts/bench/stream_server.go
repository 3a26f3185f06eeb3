package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// turn is how many milliseconds the wheel takes to come round; every stream's
// interval divides it.
const turn = 1000

const (
	streamHead = "HTTP/1.1 200 OK\r\n" + uvicornHead + "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	eventHead  = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763700000,"model":"bench","choices":[{"index":0,"delta":`
	stampMark  = `,"t":` // before the time of writing, in nanoseconds, which ends an event
	stampLen   = 19
)

func chunked(event string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(event), event) }

var (
	roleChunk = chunked(eventHead + `{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n")
	// textChunk ends in a stamp, which is written into a copy of it.
	textChunk = chunked(eventHead + `{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]` + stampMark + strings.Repeat("0", stampLen) + "}\n\n")
	endChunks = chunked(eventHead+`{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null}]}`+"\n\n") +
		chunked("data: [DONE]\n\n") + "0\r\n\r\n"
)

// stampAt is where the stamp lies in textChunk.
var stampAt = strings.Index(textChunk, stampMark) + len(stampMark)

// wheel writes the chunks of all streams from one goroutine, by a slot for each
// millisecond: a goroutine and a timer for each stream would cost as much as a
// proxy does.
type wheel struct {
	mu    sync.Mutex // guards slots and next
	slots [turn][]*outflow
	next  int // spreads the streams over the slots
}

func newWheel() *wheel { return new(wheel) }

// outflow is one stream.
type outflow struct {
	raw     syscall.RawConn
	left    int           // chunks to write
	over    chan struct{} // closed when there is no more to write
	err     error         // why, before over; nil: it is complete
	pending []byte        // what write is to write
	wrote   int
	failed  error
	write   func(uintptr) bool // made once, so that a chunk allocates nothing
}

// stream writes n chunks to c, one each interval milliseconds, and returns when
// that is done.
func (w *wheel) stream(c net.Conn, n, interval int) error {
	if interval < 1 || turn%interval != 0 {
		return fmt.Errorf("an interval of %d ms does not divide %d", interval, turn)
	}
	if _, err := c.Write([]byte(streamHead + roleChunk)); err != nil {
		return err
	}
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	o := &outflow{raw: raw, left: n, over: make(chan struct{})}
	o.write = func(fd uintptr) bool {
		o.wrote, o.failed = syscall.Write(int(fd), o.pending)
		return true // whatever came of it: nobody waits here
	}
	w.mu.Lock()
	phase := w.next % interval
	w.next++
	for slot := phase; slot < turn; slot += interval {
		w.slots[slot] = append(w.slots[slot], o)
	}
	w.mu.Unlock()
	<-o.over
	return o.err
}

// run turns the wheel until ctx is done. When it is late it makes up for the
// slots it missed.
func (w *wheel) run(ctx context.Context) {
	begin := time.Now()
	text := []byte(textChunk)
	for done := 0; ctx.Err() == nil; done++ {
		if early := time.Until(begin.Add(time.Duration(done) * time.Millisecond)); early > 0 {
			time.Sleep(early)
		}
		w.mu.Lock()
		slot := w.slots[done%turn]
		kept := slot[:0]
		for _, o := range slot {
			if o.step(text) {
				kept = append(kept, o)
			}
		}
		clear(slot[len(kept):])
		w.slots[done%turn] = kept
		w.mu.Unlock()
	}
}

// step writes the next chunk, and reports whether more are to come.
func (o *outflow) step(text []byte) bool {
	select {
	case <-o.over: // ended in another slot
		return false
	default:
	}
	o.pending = text
	if o.left == 0 {
		o.pending = []byte(endChunks)
	} else {
		stamp(text[stampAt:][:stampLen], time.Now().UnixNano())
	}
	if err := o.raw.Write(o.write); err != nil {
		o.failed = err
	}
	switch {
	case errors.Is(o.failed, syscall.EAGAIN):
		return true // a reader so slow is late anyway
	case o.failed == nil && o.wrote < len(o.pending):
		o.failed = fmt.Errorf("a chunk of %d bytes was cut at %d", len(o.pending), o.wrote)
	}
	if o.failed == nil && o.left > 0 {
		o.left--
		return true
	}
	o.err = o.failed
	close(o.over)
	return false
}

// stamp writes t in decimal over all of b.
func stamp(b []byte, t int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = byte('0' + t%10)
		t /= 10
	}
}
