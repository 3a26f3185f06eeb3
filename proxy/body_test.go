package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestBodyOverLimitStatus413(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.BodyBytes = 10_000 }, r)
	const start = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
	for name, request := range map[string]string{
		"length":       fmt.Sprintf("%sContent-Length: 10001\r\n\r\n%s", start, strings.Repeat(" ", 10_001)),
		"10 GB":        start + "Content-Length: 10000000000\r\n\r\n{",
		"chunked":      start + "Transfer-Encoding: chunked\r\n\r\n" + chunk(strings.Repeat(" ", 6000)) + chunk(strings.Repeat(" ", 6000)),
		"100-continue": start + "Expect: 100-continue\r\nContent-Length: 10001\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			resp, answer := f.raw(request)
			if refused(t, answer); resp.StatusCode != http.StatusRequestEntityTooLarge || !resp.Close {
				t.Errorf("got %d, close %v", resp.StatusCode, resp.Close)
			}
		})
	}
	if len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestBodyAtLimitAccepted(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyBytes = 10_000 }, &replica{script: always(answered("200 OK", whole))})
	body := askWhole + strings.Repeat(" ", 10_000-len(askWhole))
	if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusOK {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

func TestStalledBodyStatus408(t *testing.T) {
	t.Parallel()
	r := &replica{}
	f := serve(t, func(o *Options) { o.BodyIdle = 50 * time.Millisecond }, r)
	resp, answer := f.raw("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
	if refused(t, answer); resp.StatusCode != http.StatusRequestTimeout || !resp.Close {
		t.Errorf("got %d, close %v", resp.StatusCode, resp.Close)
	}
	if f.awaitIdle(); len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestSlowBodyAccepted(t *testing.T) {
	t.Parallel()
	const idle = 2 * time.Second
	f := serve(t, func(o *Options) { o.BodyIdle = idle }, &replica{script: always(answered("200 OK", whole))})
	conn := f.dial()
	padding := strings.Repeat(" ", 1<<10) // 2 KiB/s
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", 7*len(padding)+len(askWhole), padding)
	for range 6 { // 3 s in all
		time.Sleep(idle / 4)
		io.WriteString(conn, padding)
	}
	io.WriteString(conn, askWhole)
	if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("got %v, %v", resp, err)
	}
}

func TestTricklingBodyStatus408(t *testing.T) {
	t.Parallel()
	const idle = time.Second
	f := serve(t, func(o *Options) { o.BodyIdle = idle }, &replica{})
	conn := f.dial()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", 1<<20, strings.Repeat(" ", 64<<10))
	var resp *http.Response
	var err error
	ended := make(chan bool)
	go func() {
		defer close(ended)
		resp, err = http.ReadResponse(bufio.NewReader(conn), nil)
	}()
	for waiting := true; waiting; {
		select {
		case <-ended:
			waiting = false
		case <-time.After(idle * 29 / 30):
			io.WriteString(conn, " ")
		}
	}
	if err != nil || resp.StatusCode != http.StatusRequestTimeout || !resp.Close {
		t.Errorf("got %v, %v", resp, err)
	}
}

func TestBodyMemoryLimitStatus503(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyBytesTotal = 6 << 10 }, &replica{script: always(answered("200 OK", whole))})
	slow := f.dial()
	io.WriteString(slow, fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole),
		askWhole[:1]))
	eventually(t, "the slow body has its buffer", func() bool { return f.proxy.tenants.BodyBytesInUse() > 0 })
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if refused(t, answer); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	io.WriteString(slow, askWhole[1:])
	if resp, err := http.ReadResponse(bufio.NewReader(slow), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("the slow one got %v, %v", resp, err)
	}
	f.awaitIdle()
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
		t.Errorf("with room again: %d", resp.StatusCode)
	}
}
