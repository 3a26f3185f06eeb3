package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// model is the name of the mock replicas' model.
const model = "bench"

const (
	marker       = "the output of a mock replica" // in every response without streaming
	mockResponse = `{"id":"chatcmpl-1","object":"chat.completion","created":1763700000,"model":"bench","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"` + marker +
		`"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":250,"total_tokens":258,"completion_tokens":8}}`
	// prefilled is the response to a prefill request.
	prefilled = `{"id":"chatcmpl-1","object":"chat.completion","created":1763700000,"model":"bench","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"the"},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":250,` +
		`"total_tokens":251,"completion_tokens":1},` +
		`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[340,341,342,343]],` +
		`"remote_engine_id":"05001d3b-7c5f-4e0e-9d8a-2f4d1c5b6a70","remote_request_id":"chatcmpl-ab5b573f2a3c63aa-bac41073",` +
		`"remote_host":"127.0.0.1","remote_port":5690,"tp_size":1,"remote_num_tokens":250}}`
	modelList = `{"object":"list","data":[{"id":"bench","object":"model","created":1763700000,"owned_by":"vllm","root":"bench",` +
		`"parent":null,"max_model_len":1000000}]}`
	uvicornHead = "date: Sat, 01 Nov 2025 00:00:00 GMT\r\nserver: uvicorn\r\n"
)

// mock is a fleet of replicas that respond at once. They run in a separate process, so that
// their cost is not attributed to the proxies. Requests without streaming get the same
// short response; streams are written by streams.
type mock struct {
	streams *streamServer
	metrics string // response of /metrics
}

// runMock is the role "mock": it serves replicas until ctx is done, and prints their URLs,
// one per line, when all listen.
func runMock(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("mock", flag.ExitOnError)
	replicas := flags.Int("replicas", 4, "how many")
	page := flags.String("metrics", "", "file with a replica's /metrics")
	flags.Parse(args)

	text, err := os.ReadFile(*page)
	if err != nil {
		return err
	}
	m := &mock{streams: new(streamServer), metrics: withLargeCache(string(text))}
	var urls strings.Builder
	for range *replicas {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		go m.serveListener(l)
		fmt.Fprintf(&urls, "http://%s\n", l.Addr())
	}
	fmt.Print(urls.String())
	m.streams.writeChunksUntilDone(ctx)
	return nil
}

// withLargeCache returns the metrics with the model's name and a cache of 2,000,000 tokens,
// which 9,000 streams on four replicas do not fill, so that no request is queued.
func withLargeCache(metricsPage string) string {
	return "vllm:nixl_num_failed_transfers_total 0\n" + strings.NewReplacer(
		`model_name="tiny"`, `model_name="`+model+`"`,
		`kv_cache_size_tokens="16384"`, `kv_cache_size_tokens="2000000"`,
		`num_gpu_blocks="512"`, `num_gpu_blocks="62500"`,
	).Replace(metricsPage)
}

// serveListener accepts connections until the listener is closed, and serves each in a
// goroutine.
func (m *mock) serveListener(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go m.serveConn(c)
	}
}

func (m *mock) serveConn(c net.Conn) {
	defer c.Close()
	var (
		br   = bufio.NewReader(c)
		h    messageHead
		body []byte
		err  error
	)
	for {
		if err = h.read(br); err != nil {
			return
		}
		if body, err = h.readBody(br, body); err != nil {
			return
		}
		target := string(h.firstLine)
		if cut := strings.LastIndexByte(target, ' '); cut >= 0 {
			target = target[:cut]
		}
		switch target {
		case "POST /v1/chat/completions":
			if bytes.Contains(body[:min(len(body), 100)], []byte(`"do_remote_decode":true`)) {
				err = writeResponse(c, "application/json", prefilled)
				break
			}
			if !wantsStream(body) {
				err = writeResponse(c, "application/json", mockResponse)
				break
			}
			if cap(body) > 4<<10 {
				body = nil // saves memory: 9,000 streams are open at once
			}
			err = m.streams.writeStream(c, intField(body, "max_completion_tokens", 1), intField(body, "seed", 1000))
		case "GET /health":
			err = writeResponse(c, "text/plain", "")
		case "GET /v1/models":
			err = writeResponse(c, "application/json", modelList)
		case "GET /version":
			err = writeResponse(c, "application/json", `{"version":"0.32.0"}`)
		case "GET /metrics":
			err = writeResponse(c, "text/plain; version=0.0.4; charset=utf-8", m.metrics)
		default:
			_, err = c.Write([]byte("HTTP/1.1 404 Not Found\r\n" + uvicornHead + "content-length: 0\r\n\r\n"))
		}
		if err != nil {
			return
		}
	}
}

func writeResponse(c net.Conn, contentType, body string) error {
	_, err := c.Write([]byte("HTTP/1.1 200 OK\r\n" + uvicornHead + "content-length: " + strconv.Itoa(len(body)) + "\r\ncontent-type: " +
		contentType + "\r\n\r\n" + body))
	return err
}

// wantsStream looks for the field as newChatRequest writes it, and as routers that encode
// the body again do. No prompt contains it.
func wantsStream(body []byte) bool {
	return bytes.Contains(body, []byte(`"stream":true`)) || bytes.Contains(body, []byte(`"stream": true`))
}

// intField returns a number of the body, or fallback.
func intField(body []byte, name string, fallback int) int {
	_, rest, found := bytes.Cut(body, []byte(`"`+name+`":`))
	if !found {
		return fallback
	}
	n := 0
	if err := json.NewDecoder(bytes.NewReader(rest)).Decode(&n); err != nil {
		return fallback
	}
	return n
}

// slotCount is the number of slots of a streamServer, one per millisecond. Every stream's
// interval must divide it.
const slotCount = 1000

const (
	streamHead = "HTTP/1.1 200 OK\r\n" + uvicornHead + "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	eventHead  = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763700000,"model":"bench","choices":[{"index":0,` +
		`"delta":`
	stampMark = `,"t":` // precedes the time of writing, in nanoseconds, at the end of an event
	stampLen  = 19
)

// encodeChunk returns an event as one chunk of a chunked body.
func encodeChunk(event string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(event), event) }

var (
	roleChunk = encodeChunk(eventHead + `{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n")
	// textChunk ends with a timestamp that is set in a copy of it.
	textChunk = encodeChunk(eventHead + `{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]` +
		stampMark + strings.Repeat("0", stampLen) + "}\n\n")
	endChunks = encodeChunk(eventHead+`{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null}]}`+"\n\n") +
		encodeChunk("data: [DONE]\n\n") + "0\r\n\r\n"
)

// stampAt is the index of the timestamp in textChunk.
var stampAt = strings.Index(textChunk, stampMark) + len(stampMark)

// streamServer writes the chunks of all streams from one goroutine (a timing wheel with one
// slot per millisecond): a goroutine and a timer per stream would cost as much as a proxy.
type streamServer struct {
	mu    sync.Mutex // guards slots and next
	slots [slotCount][]*serverStream
	next  int // distributes the streams over the slots
}

// serverStream is one stream.
type serverStream struct {
	raw     syscall.RawConn
	left    int           // chunks to write
	over    chan struct{} // closed when the stream has ended
	err     error         // set before over is closed; nil: complete
	pending []byte        // bytes for write
	wrote   int
	failed  error
	write   func(uintptr) bool // created once, so that a chunk allocates nothing
}

// writeStream sends a response of this many chunks to c, one every intervalMillis, and
// returns when it has ended.
func (w *streamServer) writeStream(c net.Conn, chunks, intervalMillis int) error {
	if intervalMillis < 1 || slotCount%intervalMillis != 0 {
		return fmt.Errorf("an interval of %d ms does not divide %d", intervalMillis, slotCount)
	}
	if _, err := c.Write([]byte(streamHead + roleChunk)); err != nil {
		return err
	}
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	o := &serverStream{raw: raw, left: chunks, over: make(chan struct{})}
	o.write = func(fd uintptr) bool {
		o.wrote, o.failed = syscall.Write(int(fd), o.pending)
		return true // also on EAGAIN: do not wait
	}
	w.mu.Lock()
	phase := w.next % intervalMillis
	w.next++
	for slot := phase; slot < slotCount; slot += intervalMillis {
		w.slots[slot] = append(w.slots[slot], o)
	}
	w.mu.Unlock()
	<-o.over
	return o.err
}

// writeChunksUntilDone writes the chunks of one slot per millisecond until ctx is done.
// When late, it catches up with the missed slots.
func (w *streamServer) writeChunksUntilDone(ctx context.Context) {
	begin := time.Now()
	text := []byte(textChunk)
	for done := 0; ctx.Err() == nil; done++ {
		if early := time.Until(begin.Add(time.Duration(done) * time.Millisecond)); early > 0 {
			time.Sleep(early)
		}
		w.mu.Lock()
		slot := w.slots[done%slotCount]
		kept := slot[:0]
		for _, o := range slot {
			if o.writeNextChunk(text) {
				kept = append(kept, o)
			}
		}
		clear(slot[len(kept):])
		w.slots[done%slotCount] = kept
		w.mu.Unlock()
	}
}

// writeNextChunk writes the next chunk and reports whether more follow.
func (o *serverStream) writeNextChunk(chunk []byte) (more bool) {
	select {
	case <-o.over: // ended in another slot
		return false
	default:
	}
	o.pending = chunk
	if o.left == 0 {
		o.pending = []byte(endChunks)
	} else {
		writeDecimal(chunk[stampAt:][:stampLen], time.Now().UnixNano())
	}
	if err := o.raw.Write(o.write); err != nil {
		o.failed = err
	}
	switch {
	case errors.Is(o.failed, syscall.EAGAIN):
		return true // the reader is slow: skip this chunk
	case o.failed == nil && o.wrote < len(o.pending):
		o.failed = fmt.Errorf("short write of a chunk: %d bytes, written %d", len(o.pending), o.wrote)
	}
	if o.failed == nil && o.left > 0 {
		o.left--
		return true
	}
	o.err = o.failed
	close(o.over)
	return false
}

// writeDecimal fills b with the last digits of a value.
func writeDecimal(b []byte, value int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = byte('0' + value%10)
		value /= 10
	}
}
