package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// loadResult is what runLoad prints.
type loadResult struct {
	Requests   int64
	Failed     int64
	FirstError string  // the first failure
	P50, P99   float64 // µs
}

// ioTimeout bounds the wait for a connection, a response or a chunk.
const ioTimeout = 30 * time.Second

// runLoad is the role "load": it sends requests without streams over concurrent
// connections, each without a pause, and prints a loadResult as JSON.
//
// It writes and reads HTTP itself, like runStreams, instead of using loadgen.Client: that takes
// 31 µs of CPU for a request of 1 KB and 110 µs for one of 32 KB, about as much as the proxy, with
// which it shares the cores. This takes 7 µs and 14 µs.
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
		latencies histogram
		result    loadResult
		failed    atomic.Int64
		first     sync.Once
		running   sync.WaitGroup
		targets   = strings.Split(*addrs, ",")
	)
	for i := range *clients {
		running.Go(func() {
			a := newChatRequest(*seed<<20+uint64(i), *size, *kind, 0, 0)
			for ctx.Err() == nil {
				if err := sendRequests(ctx, targets[i%len(targets)], a, &latencies); err != nil {
					first.Do(func() { result.FirstError = err.Error() })
					if failed.Add(1) > 1000 {
						return
					}
				}
			}
		})
	}
	running.Wait()
	for i := range latencies.counts {
		result.Requests += latencies.counts[i].Load()
	}
	result.Failed = failed.Load()
	result.P50, result.P99 = micros(latencies.quantile(0.5)), micros(latencies.quantile(0.99))
	return json.NewEncoder(os.Stdout).Encode(result)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// sendRequests sends requests over one connection until ctx is done or a request fails.
func sendRequests(ctx context.Context, addr string, a *chatRequest, latencies *histogram) error {
	c, err := net.DialTimeout("tcp", addr, ioTimeout)
	if err != nil {
		return err
	}
	defer c.Close()
	var (
		br   = bufio.NewReader(c)
		h    messageHead
		body []byte
	)
	end, _ := ctx.Deadline()
	c.SetDeadline(end.Add(ioTimeout))
	for ctx.Err() == nil {
		request := a.renewNonce()
		sent := time.Now()
		if _, err := c.Write(request); err != nil {
			return err
		}
		if err := h.read(br); err != nil {
			return err
		}
		if body, err = h.readBody(br, body); err != nil {
			return err
		}
		latencies.add(time.Since(sent))
		if !isStatus200(h.firstLine) || !bytes.Contains(body, []byte(marker)) {
			return fmt.Errorf("%s: %.200s", h.firstLine, body)
		}
	}
	return nil
}

func isStatus200(statusLine []byte) bool {
	_, rest, _ := bytes.Cut(statusLine, []byte(" "))
	return bytes.HasPrefix(rest, []byte("200"))
}

// The kinds of prompts.
const (
	hot    = "hot"    // all prompts are equal
	cold   = "cold"   // no two prompts have a common prefix
	shared = "shared" // all prompts have the same first half
)

const nonceLen = 16

// chatRequest is a request that is sent many times, each time with a new nonce.
type chatRequest struct {
	bytes []byte // head and body
	nonce []byte // the part of bytes that changes; nil: none
	rng   *rand.Rand
}

// newChatRequest returns a chat of about size bytes. The mock streams chunks with
// intervalMillis between them; with chunks 0 the request is not a stream.
func newChatRequest(seed uint64, size int, kind string, chunks, intervalMillis int) *chatRequest {
	end := `"}],"temperature":0.7}`
	if chunks > 0 {
		end = fmt.Sprintf(`"}],"temperature":0.7,"stream":true,"max_completion_tokens":%d,"seed":%d}`, chunks, intervalMillis)
	}
	begin := `{"model":"` + model + `","messages":[{"role":"system","content":"You answer questions."},{"role":"user","content":"`
	text := sampleText(size - len(begin) - len(end) - nonceLen)
	mark := strings.Repeat("0", nonceLen)
	cut := 0
	if kind == shared {
		cut = len(text) / 2
		if text[cut-1] == '\\' {
			cut++
		}
	}
	body := begin + text[:cut] + mark + text[cut:] + end
	a := &chatRequest{rng: rand.New(rand.NewPCG(seed, 1))}
	a.bytes = fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: "+
		"application/json\r\n"+
		"User-Agent: OpenAI/Python 3.52.0\r\nAuthorization: Bearer none\r\nX-Stainless-Lang: python\r\nX-Stainless-Runtime: "+
		"CPython\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if kind != hot {
		at := len(a.bytes) - len(body) + len(begin) + cut
		a.nonce = a.bytes[at : at+nonceLen]
	}
	return a
}

// renewNonce returns the request with a new nonce. It is valid until the next call.
func (a *chatRequest) renewNonce() []byte {
	for i, v := 0, a.rng.Uint64(); i < len(a.nonce); i++ {
		a.nonce[i] = "0123456789abcdef"[v&15]
		v >>= 4
	}
	return a.bytes
}

// sampleText returns n bytes of English words as in a JSON string, with an escape about
// every 60 bytes.
func sampleText(n int) string {
	words := strings.Fields("the of and to in is that for it as with on by at this have are not which one more when people other time " +
		"could system data number question government company history market example program report service country")
	rng := rand.New(rand.NewPCG(7, 7))
	var b strings.Builder
	for line := 0; b.Len() < n; {
		word := words[rng.IntN(len(words))]
		if line += len(word) + 1; line > 60 {
			word, line = word+`.\n`, 0
		}
		b.WriteString(word + " ")
	}
	text := strings.TrimRight(b.String()[:max(n, 0)], `\`)
	return text + strings.Repeat(" ", max(n, 0)-len(text))
}

// bucketBits is the binary logarithm of the number of buckets per doubling. With 7 the
// error of a value is below 1 %.
const bucketBits = 7

// histogram counts durations. Safe for concurrent use.
type histogram struct {
	counts [(64 - bucketBits) << bucketBits]atomic.Int64
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketIndex(uint64(max(d, 0)))].Add(1)
}

// bucketIndex returns the index of v's bucket: its exponent and its leading bits.
func bucketIndex(v uint64) int {
	shift := max(0, bits.Len64(v)-bucketBits-1)
	return shift<<bucketBits + int(v>>shift)
}

// bucketLowerBound returns the smallest value of a bucket.
func bucketLowerBound(bucket int) uint64 {
	shift := max(0, bucket>>bucketBits-1)
	return uint64(bucket-shift<<bucketBits) << shift
}

// quantile returns the q-quantile, or 0 if the histogram is empty.
func (h *histogram) quantile(q float64) time.Duration {
	var total int64
	for i := range h.counts {
		total += h.counts[i].Load()
	}
	rest := int64(q * float64(total))
	for i := range h.counts {
		if rest -= h.counts[i].Load(); rest < 0 {
			return time.Duration(bucketLowerBound(i))
		}
	}
	return 0
}

// reset sets all counts to 0.
func (h *histogram) reset() {
	for i := range h.counts {
		h.counts[i].Store(0)
	}
}
