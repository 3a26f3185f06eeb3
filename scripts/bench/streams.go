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

// streamed is what a client saw of streams, as it prints it.
type streamed struct {
	Open     int64   // streams that are or were open
	Lost     int64   // of all, those that could not be opened, broke off or had chunks missing
	Complete int64   // came to their end, whole
	Fault    string  // of the first lost one
	Chunks   int64   // within the window
	P50, P99 float64 // µs from a chunk's writing to its reading, within the window
}

// watcher is the client of many streams.
type watcher struct {
	addrs            []string
	size             int
	chunks, interval int
	kind             string

	open, complete, lost, seen atomic.Int64
	delays                     histogram
	first                      sync.Once
	fault                      string
}

// runStreams is the client of streams. It is driven from its standard input, so
// that whoever started it can look at the proxy at the right moments: it writes
// a line when all streams are open; at each line that it then reads it writes
// what it has seen since the one before, as JSON; and it ends, cutting off what
// is still open, with its input.
func runStreams(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("streams", flag.ExitOnError)
	addrs := flags.String("addr", "", "host:port, several with commas")
	streams := flags.Int("streams", 1, "how many")
	w := watcher{}
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
	door := make(chan struct{}, 32) // of so many at once; more is a burst that no listener's queue holds
	for i := range *streams {
		opening.Add(1)
		running.Go(func() {
			var once sync.Once
			opened := func() { once.Do(func() { <-door; opening.Done() }) }
			door <- struct{}{}
			err := w.watch(ctx, i, opened)
			opened()
			switch {
			case err == nil:
				w.complete.Add(1)
			case ctx.Err() == nil:
				w.first.Do(func() { w.fault = err.Error() }) // before it is counted: report looks at it then
				w.lost.Add(1)
			}
		})
	}
	opening.Wait()
	fmt.Println("open")
	for commands := bufio.NewScanner(os.Stdin); commands.Scan(); {
		if err := json.NewEncoder(os.Stdout).Encode(w.report()); err != nil {
			return err
		}
	}
	return nil
}

// report tells what was seen since the last one, and begins a new window.
func (w *watcher) report() streamed {
	s := streamed{
		Open: w.open.Load(), Complete: w.complete.Load(), Lost: w.lost.Load(), Chunks: w.seen.Swap(0),
		P50: micros(w.delays.quantile(0.5)), P99: micros(w.delays.quantile(0.99)),
	}
	if s.Lost > 0 {
		s.Fault = w.fault
	}
	w.delays.reset()
	return s
}

var errCut = errors.New("the stream ended before its end")

// watch opens stream i and reads it to its end. opened is called when its first
// chunk has come.
func (w *watcher) watch(ctx context.Context, i int, opened func()) error {
	dialer := net.Dialer{Timeout: patience}
	c, err := dialer.DialContext(ctx, "tcp", w.addrs[i%len(w.addrs)])
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if _, err := c.Write(newAsk(uint64(i)+uint64(time.Now().UnixNano())<<20, w.size, w.kind, w.chunks, w.interval).next()); err != nil {
		return err
	}
	br := bufio.NewReaderSize(c, 2<<10)
	var h head
	c.SetReadDeadline(time.Now().Add(patience))
	if err := h.read(br); err != nil {
		return err
	}
	if !isOK(h.first) {
		body, _ := h.body(br, nil)
		return fmt.Errorf("%s: %.200s", h.first, body)
	}
	var body io.Reader = br
	if h.chunked {
		body = &chunks{br: br}
	}
	events := bufio.NewReaderSize(body, 1<<10)
	chunks := 0
	for {
		line, err := events.ReadSlice('\n')
		if err != nil {
			return errors.Join(errCut, err)
		}
		if bytes.Equal(line, []byte("data: [DONE]\n")) {
			if chunks != w.chunks {
				return fmt.Errorf("%d chunks of %d came", chunks, w.chunks)
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
		w.delays.add(time.Duration(time.Now().UnixNano() - number(line[at+len(stampMark):][:stampLen])))
		w.seen.Add(1)
		if chunks&15 == 0 || w.interval >= 100 {
			c.SetReadDeadline(time.Now().Add(patience))
		}
	}
}

func number(digits []byte) (n int64) {
	for _, d := range digits {
		n = 10*n + int64(d-'0')
	}
	return n
}
