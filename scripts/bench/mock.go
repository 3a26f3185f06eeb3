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
	"strconv"
	"strings"
)

// model is what the mock replicas serve.
const model = "bench"

const (
	marker      = "the answer of a mock replica" // in every whole answer
	mockAnswer  = `{"id":"chatcmpl-1","object":"chat.completion","created":1763700000,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"` + marker + `"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":250,"total_tokens":258,"completion_tokens":8}}`
	modelList   = `{"object":"list","data":[{"id":"bench","object":"model","created":1763700000,"owned_by":"vllm","root":"bench","parent":null,"max_model_len":1000000}]}`
	uvicornHead = "date: Sat, 01 Nov 2025 00:00:00 GMT\r\nserver: uvicorn\r\n"
)

// mock is a fleet of replicas that answer at once, in a process of their own so
// that what they cost is not taken for the proxies'. Whole chats get the same
// short answer; streams are written by the wheel.
type mock struct {
	wheel   *wheel
	metrics string // the page of every replica's /metrics
}

// runMock serves replicas until ctx is done, and prints their URLs, one a line,
// once all of them listen.
func runMock(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("mock", flag.ExitOnError)
	replicas := flags.Int("replicas", 4, "how many")
	page := flags.String("metrics", "", "file with a replica's /metrics")
	flags.Parse(args)

	text, err := os.ReadFile(*page)
	if err != nil {
		return err
	}
	m := &mock{wheel: newWheel(), metrics: roomy(string(text))}
	var urls strings.Builder
	for range *replicas {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		go m.accept(l)
		fmt.Fprintf(&urls, "http://%s\n", l.Addr())
	}
	fmt.Print(urls.String())
	m.wheel.run(ctx)
	return nil
}

// roomy gives the page our model's name and a cache of 2,000,000 tokens, which
// 9,000 streams over four replicas do not fill: it is
// the relay that is measured, not the wait for a replica.
func roomy(page string) string {
	return strings.NewReplacer(
		`model_name="tiny"`, `model_name="`+model+`"`,
		`kv_cache_size_tokens="16384"`, `kv_cache_size_tokens="2000000"`,
		`num_gpu_blocks="512"`, `num_gpu_blocks="62500"`,
	).Replace(page)
}

// accept serves each connection in a goroutine that ends with it; the process
// ends with them all.
func (m *mock) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go m.serve(c)
	}
}

func (m *mock) serve(c net.Conn) {
	defer c.Close()
	var (
		br   = bufio.NewReader(c)
		h    head
		body []byte
		err  error
	)
	for {
		if err = h.read(br); err != nil {
			return
		}
		if body, err = h.body(br, body); err != nil {
			return
		}
		target := string(h.first)
		if cut := strings.LastIndexByte(target, ' '); cut >= 0 {
			target = target[:cut]
		}
		switch target {
		case "POST /v1/chat/completions":
			if !asksStream(body) {
				err = answer(c, "application/json", mockAnswer)
				break
			}
			if cap(body) > 4<<10 {
				body = nil // 9,000 streams are open at once
			}
			err = m.wheel.stream(c, field(body, "max_completion_tokens", 1), field(body, "seed", 1000))
		case "GET /health":
			err = answer(c, "text/plain", "")
		case "GET /v1/models":
			err = answer(c, "application/json", modelList)
		case "GET /metrics":
			err = answer(c, "text/plain; version=0.0.4; charset=utf-8", m.metrics)
		default:
			_, err = c.Write([]byte("HTTP/1.1 404 Not Found\r\n" + uvicornHead + "content-length: 0\r\n\r\n"))
		}
		if err != nil {
			return
		}
	}
}

func answer(c net.Conn, kind, body string) error {
	_, err := c.Write([]byte("HTTP/1.1 200 OK\r\n" + uvicornHead + "content-length: " + strconv.Itoa(len(body)) + "\r\ncontent-type: " + kind + "\r\n\r\n" + body))
	return err
}

// asksStream looks for the field as we wrote it and as routers that write bodies
// anew do; no prompt of ours holds the word.
func asksStream(body []byte) bool {
	return bytes.Contains(body, []byte(`"stream":true`)) || bytes.Contains(body, []byte(`"stream": true`))
}

// field returns a whole number from the body.
func field(body []byte, name string, missing int) int {
	_, rest, found := bytes.Cut(body, []byte(`"`+name+`":`))
	if !found {
		return missing
	}
	n := 0
	if err := json.NewDecoder(bytes.NewReader(rest)).Decode(&n); err != nil {
		return missing
	}
	return n
}
