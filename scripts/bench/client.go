package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// loaded is what a client saw of whole answers, as it prints it.
type loaded struct {
	Requests int64
	Failed   int64
	Fault    string  // the first failure
	P50, P99 float64 // µs
}

// patience bounds the wait for anything that a proxy owes the client.
const patience = 30 * time.Second

// runLoad is the client that asks for whole answers, each of its connections for
// the next as soon as it has one, and prints what it saw.
func runLoad(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	addrs := flags.String("addr", "", "host:port, several with commas")
	clients := flags.Int("clients", 1, "connections")
	size := flags.Int("size", 1<<10, "bytes of a body")
	kind := flags.String("prompts", hot, "hot, cold or shared")
	length := flags.Duration("for", time.Second, "how long")
	seed := flags.Uint64("seed", 1, "of the nonces")
	flags.Parse(args)

	ctx, cancel := context.WithTimeout(ctx, *length)
	defer cancel()
	var (
		took    histogram
		result  loaded
		failed  atomic.Int64
		first   sync.Once
		running sync.WaitGroup
		targets = strings.Split(*addrs, ",")
	)
	for i := range *clients {
		running.Go(func() {
			a := newAsk(*seed<<20+uint64(i), *size, *kind, 0, 0)
			for ctx.Err() == nil {
				if err := keepAsking(ctx, targets[i%len(targets)], a, &took); err != nil {
					first.Do(func() { result.Fault = err.Error() })
					if failed.Add(1) > 1000 {
						return
					}
				}
			}
		})
	}
	running.Wait()
	for i := range took.counts {
		result.Requests += took.counts[i].Load()
	}
	result.Failed = failed.Load()
	result.P50, result.P99 = micros(took.quantile(0.5)), micros(took.quantile(0.99))
	return json.NewEncoder(os.Stdout).Encode(result)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// keepAsking sends one request after another over one connection, until ctx is
// done or one fails.
func keepAsking(ctx context.Context, addr string, a *ask, took *histogram) error {
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		return err
	}
	defer c.Close()
	var (
		br   = bufio.NewReader(c)
		h    head
		body []byte
	)
	end, _ := ctx.Deadline()
	c.SetDeadline(end.Add(patience))
	for ctx.Err() == nil {
		request := a.next()
		sent := time.Now()
		if _, err := c.Write(request); err != nil {
			return err
		}
		if err := h.read(br); err != nil {
			return err
		}
		if body, err = h.body(br, body); err != nil {
			return err
		}
		took.add(time.Since(sent))
		if !isOK(h.first) || !bytes.Contains(body, []byte(marker)) {
			return fmt.Errorf("%s: %.200s", h.first, body)
		}
	}
	return nil
}

func isOK(statusLine []byte) bool {
	_, rest, _ := bytes.Cut(statusLine, []byte(" "))
	return bytes.HasPrefix(rest, []byte("200"))
}
