package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestBodyPoolRead(t *testing.T) {
	const each, total = 1 << 20, 4 << 20
	cases := []struct {
		name         string
		size, length int
		want         error
		held         int64 // by the buffer
	}{
		{"empty", 0, 0, nil, 4 << 10},
		{"one byte", 1, 1, nil, 4 << 10},
		{"exact fit of the smallest", 4 << 10, 4 << 10, nil, 4 << 10},
		{"one more", 4<<10 + 1, 4<<10 + 1, nil, 8 << 10},
		{"trusted length", 64 << 10, 64 << 10, nil, 64 << 10},
		{"beyond the trusted length", 64<<10 + 1, 64<<10 + 1, nil, 128 << 10},
		{"claimed large, came small", 10, 1 << 20, nil, 64 << 10},
		{"unknown length, fits the smallest", 4 << 10, -1, nil, 4 << 10},
		{"unknown length, grows once", 4<<10 + 1, -1, nil, 16 << 10},
		{"unknown length, grows twice", 16<<10 + 1, -1, nil, 64 << 10},
		{"the limit", each, each, nil, each},
		{"the limit, unknown length", each, -1, nil, each},
		{"over the limit, said so", each + 1, each + 1, errBodyTooLarge, 0},
		{"over the limit, unknown length", each + 1, -1, errBodyTooLarge, each},
		{"10 GB said", 10, 10 << 30, errBodyTooLarge, 0},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := bodyPool{tenants: new(tenants)}
			body := bytes.Repeat([]byte("abcdefg"), c.size/7+1)[:c.size]
			for how, from := range map[string]io.Reader{
				"all at once": bytes.NewReader(body), "halves": iotest.HalfReader(bytes.NewReader(body)), "end with the last bytes": iotest.DataErrReader(bytes.NewReader(body)),
			} {
				got, err := b.readBody(from, int64(c.length), tenant{}, bodyLimits{each, total})
				if !errors.Is(err, c.want) || b.tenants.bodyBytesInUse() != c.held {
					t.Errorf("%s: error %v, %d bytes held, want %v, %d", how, err, b.tenants.bodyBytesInUse(), c.want, c.held)
				}
				if err == nil && !bytes.Equal(got, body) {
					t.Errorf("%s: the body was changed", how)
				}
				b.releaseBuffer(got, tenant{})
				if held := b.tenants.bodyBytesInUse(); held != 0 {
					t.Errorf("%s: %d bytes still held", how, held)
				}
			}
		})
	}
}

func TestBodyMemoryLimit(t *testing.T) {
	b, most := bodyPool{tenants: new(tenants)}, bodyLimits{1 << 20, 140 << 10}
	var got [][]byte
	for range 2 {
		buf, err := b.readBody(bytes.NewReader(make([]byte, 64<<10)), 64<<10, tenant{}, most)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf)
	}
	small, err := b.readBody(bytes.NewReader(make([]byte, 9<<10)), -1, tenant{}, most) // 4 KiB, and has to grow
	if !errors.Is(err, errBodyMemory) {
		t.Errorf("error %v", err)
	}
	b.releaseBuffer(small, tenant{})
	b.releaseBuffer(got[0], tenant{})
	if buf, err := b.readBody(bytes.NewReader(make([]byte, 9<<10)), -1, tenant{}, most); err != nil {
		t.Errorf("with room again: %v", err)
	} else {
		b.releaseBuffer(buf, tenant{})
	}
	b.releaseBuffer(got[1], tenant{})
	if b.tenants.bodyBytesInUse() != 0 {
		t.Errorf("%d bytes still held", b.tenants.bodyBytesInUse())
	}
}

func TestBodyPoolReadError(t *testing.T) {
	b := bodyPool{tenants: new(tenants)}
	buf, err := b.readBody(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(io.ErrUnexpectedEOF)), 10, tenant{}, bodyLimits{1 << 20, 1 << 20})
	if err != io.ErrUnexpectedEOF || string(buf) != "abc" {
		t.Errorf("got %q, %v", buf, err)
	}
	b.releaseBuffer(buf, tenant{})
	b.releaseBuffer(nil, tenant{})
	if b.tenants.bodyBytesInUse() != 0 {
		t.Errorf("%d bytes still held", b.tenants.bodyBytesInUse())
	}
}

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

func TestBodyRateDeadline(t *testing.T) {
	type part struct {
		at    time.Duration
		bytes int
	}
	const s = time.Second
	for name, c := range map[string]struct {
		parts    []part
		min, max time.Duration // of the deadline
	}{
		"nothing":                       {nil, 30 * s, 30 * s},
		"too little for the window":     {[]part{{0, 30<<10 - 1}}, 30 * s, 30 * s},
		"just enough":                   {[]part{{0, 30 << 10}}, 30 * s, 32 * s},
		"much at once buys no more":     {[]part{{s, 16 << 20}}, 31 * s, 33 * s},
		"then a byte at a time":         {[]part{{s, 16 << 20}, {29 * s, 1}}, 31 * s, 33 * s},
		"half the rate after much":      {[]part{{0, 16 << 20}, {10 * s, 5 << 10}, {20 * s, 5 << 10}}, 30 * s, 32 * s},
		"at the rate":                   {[]part{{0, 10 << 10}, {10 * s, 10 << 10}, {20 * s, 10 << 10}, {30 * s, 10 << 10}}, 40 * s, 42 * s},
		"a pause, and then much":        {[]part{{28 * s, 30 << 10}}, 58 * s, 60 * s},
		"long at the rate":              {[]part{{0, 90 << 10}, {20 * s, 30 << 10}, {40 * s, 30 << 10}, {3600 * s, 30 << 10}}, 3630 * s, 3632 * s},
		"what came long before is gone": {[]part{{0, 16 << 20}, {100 * s, 1 << 10}}, 30 * s, 30 * s},
	} {
		r := bodyRate{window: 30 * s}
		for _, p := range c.parts {
			r.add(p.at, p.bytes)
		}
		if got := r.deadline(); got < c.min || got > c.max {
			t.Errorf("%s: too slow at %v, want between %v and %v", name, got, c.min, c.max)
		}
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

// observingReader calls a function before each read.
type observingReader struct {
	io.Reader
	before func()
}

func (r observingReader) Read(p []byte) (int, error) {
	r.before()
	return r.Reader.Read(p)
}

func TestBodyReservationFollowsArrival(t *testing.T) {
	t.Parallel()
	const size = 5<<20 + 12345
	for _, claimed := range []int64{-1, 1, size, 60 << 20} {
		b, body := bodyPool{tenants: new(tenants)}, bytes.NewReader(make([]byte, size))
		from := observingReader{iotest.HalfReader(body), func() {
			arrived := size - int64(body.Len())
			if reserved := b.tenants.bodyBytesInUse(); reserved > 2*arrived+64<<10 {
				t.Errorf("claimed %d: %d bytes are reserved for %d that have arrived", claimed, reserved, arrived)
			}
		}}
		buf, err := b.readBody(from, claimed, tenant{}, bodyLimits{64 << 20, 1 << 30})
		if err != nil {
			t.Error(err)
		}
		b.releaseBuffer(buf, tenant{})
	}
}

func TestBodyMemoryLimitStatus503(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyBytesTotal = 6 << 10 }, &replica{script: always(answered("200 OK", whole))})
	slow := f.dial()
	io.WriteString(slow, fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole[:1]))
	eventually(t, "the slow body has its buffer", func() bool { return f.proxy.tenants.bodyBytesInUse() > 0 })
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
