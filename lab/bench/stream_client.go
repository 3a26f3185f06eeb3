package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// streamResult is what runStreams prints.
type streamResult struct {
	Open       int64   // streams opened so far
	Lost       int64   // streams that failed to open, were truncated or had missing chunks
	Complete   int64   // streams that ended completely
	FirstError string  // of the first lost stream
	Chunks     int64   // since the last report
	P50, P99   float64 // µs from writing a chunk to reading it, since the last report
}

// streamClient reads many streams.
type streamClient struct {
	addrs            []string
	size             int
	chunks, interval int
	kind             string

	open, complete, lost, seen atomic.Int64
	delays                     histogram
	first                      sync.Once
	firstError                 string
}

// runStreams is the role "streams". It prints a line when all streams are open. For each
// line on its standard input it prints a streamResult as JSON, so that the parent chooses
// when to measure. At the end of its input it closes the streams and ends.
func runStreams(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("streams", flag.ExitOnError)
	addrs := flags.String("addr", "", "host:port, several with commas")
	streams := flags.Int("streams", 1, "how many")
	w := streamClient{}
	flags.IntVar(&w.size, "size", 1<<10, "bytes of a body")
	flags.IntVar(&w.chunks, "chunks", 100, "of a stream")
	flags.IntVar(&w.interval, "interval", 1000, "milliseconds between two chunks")
	flags.StringVar(&w.kind, "prompts", cold, "hot, cold or shared")
	flags.Parse(args)
	w.addrs = strings.Split(*addrs, ",")

	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var opening sync.WaitGroup
	opens := make(chan struct{}, 32) // limits concurrent opens: a larger burst overflows listen queues
	for i := range *streams {
		opening.Add(1)
		running.Go(func() {
			var once sync.Once
			opened := func() { once.Do(func() { <-opens; opening.Done() }) }
			opens <- struct{}{}
			err := w.readStream(ctx, i, opened)
			opened()
			switch {
			case err == nil:
				w.complete.Add(1)
			case ctx.Err() == nil:
				w.first.Do(func() { w.firstError = err.Error() }) // before lost is incremented: report reads it then
				w.lost.Add(1)
			}
		})
	}
	opening.Wait()
	fmt.Println("open")
	for commands := bufio.NewScanner(os.Stdin); commands.Scan(); {
		if err := json.NewEncoder(os.Stdout).Encode(w.reportAndReset()); err != nil {
			return err
		}
	}
	return nil
}

// reportAndReset returns what was measured since the last report, and resets it.
func (w *streamClient) reportAndReset() streamResult {
	s := streamResult{
		Open: w.open.Load(), Complete: w.complete.Load(), Lost: w.lost.Load(), Chunks: w.seen.Swap(0),
		P50: micros(w.delays.quantile(0.5)), P99: micros(w.delays.quantile(0.99)),
	}
	if s.Lost > 0 {
		s.FirstError = w.firstError
	}
	w.delays.reset()
	return s
}

var errTruncated = errors.New("truncated stream")

// readStream opens stream i and reads it to its end. It calls opened at the first chunk.
func (w *streamClient) readStream(ctx context.Context, i int, opened func()) error {
	dialer := net.Dialer{Timeout: ioTimeout}
	c, err := dialer.DialContext(ctx, "tcp", w.addrs[i%len(w.addrs)])
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if _, err := c.Write(newChatRequest(uint64(i)+uint64(time.Now().UnixNano())<<20, w.size, w.kind, w.chunks,
		w.interval).renewNonce()); err != nil {
		return err
	}
	br := bufio.NewReaderSize(c, 2<<10)
	var h messageHead
	c.SetReadDeadline(time.Now().Add(ioTimeout))
	if err := h.read(br); err != nil {
		return err
	}
	if !isStatus200(h.firstLine) {
		body, _ := h.readBody(br, nil)
		return fmt.Errorf("%s: %.200s", h.firstLine, body)
	}
	var body io.Reader = br
	if h.chunked {
		body = &chunkedReader{br: br}
	}
	events := bufio.NewReaderSize(body, 1<<10)
	chunks := 0
	for {
		line, err := events.ReadSlice('\n')
		if err != nil {
			return errors.Join(errTruncated, err)
		}
		if bytes.Equal(line, []byte("data: [DONE]\n")) {
			if chunks != w.chunks {
				return fmt.Errorf("got %d of %d chunks", chunks, w.chunks)
			}
			return nil
		}
		at := bytes.LastIndex(line, []byte(stampMark))
		if at < 0 || len(line) < at+len(stampMark)+stampLen {
			continue
		}
		if chunks++; chunks == 1 {
			w.open.Add(1)
			opened()
		}
		w.delays.add(time.Duration(time.Now().UnixNano() - parseDecimal(line[at+len(stampMark):][:stampLen])))
		w.seen.Add(1)
		if chunks&15 == 0 || w.interval >= 100 {
			c.SetReadDeadline(time.Now().Add(ioTimeout))
		}
	}
}

func parseDecimal(digits []byte) (n int64) {
	for _, d := range digits {
		n = 10*n + int64(d-'0')
	}
	return n
}
