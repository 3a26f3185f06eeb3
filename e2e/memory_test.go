package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// ask sends a chat of any size to the program and returns the status; 0 is no answer.
func (p *program) ask(body string) int {
	req, _ := http.NewRequest(http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	req.Close = true // the hard case: the rest of a refused body is not read
	client := http.Client{Timeout: time.Minute}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

func TestJSONBombMemory(t *testing.T) {
	const size = 16 << 20
	fill := func(unit string) string { return strings.Repeat(unit, size/len(unit)) }
	chat := func(rest string) string {
		return `{"model":"m","messages":[{"role":"user","content":"hi"}]` + rest + `}`
	}
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", standIn{}.start(t))
	p.ask(plainChat)
	before := p.resident()
	for name, c := range map[string]struct {
		body string
		code int
	}{
		"open lists":            {fill("["), 400},
		"open objects":          {fill(`{"a":`), 400},
		"open lists in a value": {chat(`,"x":` + fill("[")), 400},
		"deep, and closed":      {chat(`,"x":` + strings.Repeat("[", 400) + strings.Repeat("]", 400)), 200},
		"a million keys":        {chat(fill(`,"k12345":1`)), 200},
		"the same key for ever": {chat(fill(`,"model":"m"`)), 400},
		"keys of an object":     {chat(`,"metadata":{"a":1` + fill(`,"a":1`) + `}`), 200},
		"a long number":         {chat(`,"temperature":` + fill("9")), 200},
		"a long fraction":       {chat(`,"max_tokens":1.` + fill("0")), 0},
		"a huge exponent":       {chat(`,"max_tokens":1e999999999`), 0},
		"a long key":            {chat(`,"` + fill("k") + `":1`), 200},
		"escapes":               {`{"model":"m","messages":[{"role":"user","content":"` + fill(`\u0041`) + `"}]}`, 200},
		"lone surrogates":       {`{"model":"m","messages":[{"role":"user","content":"` + fill(`\ud800`) + `"}]}`, 0},
		"an unfinished escape":  {`{"model":"m","messages":[{"role":"user","content":"` + fill(`\\`) + `\`, 400},
		"a million messages": {`{"model":"m","messages":[` + fill(`{"role":"user","content":""},`) + `{"role":"user","content":"hi"}]}`,
			200},
		"a million parts": {`{"model":"m","messages":[{"role":"user","content":[` + fill(`{"type":"text","text":""},`) +
			`{"type":"text","text":"hi"}]}]}`, 200},
		"a million tools": {chat(`,"tools":[` + fill(`{"type":"function","function":{"name":"f"}},`) +
			`{"type":"function","function":{"name":"f"}}]`), 200},
		"white space":             {fill(" "), 400},
		"white space, and a chat": {fill("\n") + plainChat, 200},
	} {
		code := p.ask(c.body)
		if c.code == 0 && (code == 200 || code == 400) { // both are right: it is the replica's to judge
			continue
		}
		if code != c.code {
			t.Errorf("%s: answered %d, want %d", name, code, c.code)
		}
	}
	// One body with its canonical prompt and blocks, and what the collector leaves for later.
	if grown := p.resident() - before; grown > memoryCost*24*size {
		t.Errorf("memory grew by %.0f MB", grown/1e6)
	} else {
		t.Logf("memory grew by %.0f MB", grown/1e6)
	}
	if code := p.ask(plainChat); code != 200 {
		t.Errorf("afterwards: %d", code)
	}
}

func TestConcurrentLargeBodiesMemory(t *testing.T) {
	const clients, each, total = 100, 8 << 20, 32 << 20
	t.Setenv("WARMROUTE_LIMITS_BODY_BYTES", fmt.Sprint(each))
	t.Setenv("WARMROUTE_LIMITS_BODY_BYTES_TOTAL", fmt.Sprint(total))
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", standIn{}.start(t))
	p.ask(plainChat)
	before := p.resident()
	const frame = `{"model":"m","messages":[{"role":"user","content":""}]}`
	body := strings.Replace(frame, `""`, `"`+strings.Repeat("x", each-len(frame))+`"`, 1)
	var mu sync.Mutex
	codes := map[int]int{}
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			code := p.ask(body)
			mu.Lock()
			codes[code]++
			mu.Unlock()
		})
	}
	all.Wait()
	// Who goes on uploading for longer than a refusal waits may miss it.
	if codes[200] == 0 || codes[503] == 0 || codes[200]+codes[503]+codes[0] != clients {
		t.Errorf("answered %v", codes)
	}
	// Each body has a canonical prompt beside it, and garbage waits for a collection:
	// three times the bound lives, and twice that again waits. All of them would be 50 times it.
	if grown := p.resident() - before; grown > memoryCost*10*total {
		t.Errorf("memory grew by %.0f MB", grown/1e6)
	} else {
		t.Logf("memory grew by %.0f MB; answered %v", grown/1e6, codes)
	}
	if code := p.ask(body); code != 200 {
		t.Errorf("afterwards: %d", code)
	}
}

// resident is the memory that the process has from the system, in bytes.
func (p *program) resident() float64 {
	return metricSum(p.t, p.admin, "process_resident_memory_bytes")
}

func TestSlowReadersMemory(t *testing.T) {
	const clients, size = 8, 60 << 20
	event := []byte(`data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 4000) + `"}}]}` + "\n\n")
	var sent atomic.Int64
	replica := standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for range size / len(event) {
			n, err := w.Write(event)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}}
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", replica.start(t))
	const ask = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`
	resp, err := http.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(ask))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if err != nil || n < size-int64(len(event)) {
		t.Fatalf("who reads gets %d bytes, %v", n, err)
	}

	sent.Store(0)
	before := p.resident()
	for range clients {
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(ask), ask)
	}
	// Sockets' buffers fill up, and then the replica waits.
	var last int64
	still := time.Now()
	p.eventually("the replica waits", func() bool {
		if now := sent.Load(); now != last {
			last, still = now, time.Now()
		}
		return last > 0 && time.Since(still) > 2*time.Second
	})
	if last >= clients*size/2 {
		t.Errorf("the replica could write %d MB to clients that do not read", last>>20)
	}
	if grown := p.resident() - before; grown > memoryCost*10e6 {
		t.Errorf("memory grew by %.1f MB", grown/1e6)
	} else {
		t.Logf("memory grew by %.1f MB, the replica wrote %d MB", grown/1e6, last>>20)
	}
	if got := metricSum(t, p.admin, "warmroute_backend_in_flight"); got != clients {
		t.Errorf("%v in flight", got)
	}
	if metricSum(t, p.admin, "warmroute_backend_stalled") != 0 {
		t.Error("the replica was blamed for it")
	}
}

// awaitInFlight waits until a replica works on n requests.
func (p *program) awaitInFlight(n float64) {
	p.t.Helper()
	p.eventually(fmt.Sprint(n, " requests are in flight"), func() bool { return metricSum(p.t, p.admin, "warmroute_backend_in_flight") == n })
}

// TestBodiesInFlightMemory compares docs/deploy/sizing.md with bodies that a replica works on.
func TestBodiesInFlightMemory(t *testing.T) {
	const clients, each = 8, 58 << 20 / 8
	release := make(chan struct{})
	replica := standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		if n, _ := io.Copy(io.Discard, r.Body); n > each/2 {
			<-release
		}
		fmt.Fprint(w, wholeAnswer)
	}}
	t.Setenv("WARMROUTE_ROUTING_QUEUE_REQUESTS", "0")
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", replica.start(t))
	p.ask(plainChat)
	before := p.resident()
	const frame = `{"model":"m","messages":[{"role":"user","content":""}]}`
	body := strings.Replace(frame, `""`, `"`+strings.Repeat("x", each-len(frame))+`"`, 1)
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			if code := p.ask(body); code != 200 {
				t.Errorf("answered %d", code)
			}
		})
	}
	p.awaitInFlight(clients)
	grown := p.resident() - before
	close(release)
	all.Wait()
	// The bodies and what parsing takes, twice for what the collector leaves for later, and half of that for
	// the guide's tolerance.
	if grown > memoryCost*1.5*2*(clients*each+24<<20) {
		t.Errorf("memory grew by %.0f MiB for %d MiB of bodies", grown/(1<<20), clients*each>>20)
	} else {
		t.Logf("memory grew by %.0f MiB for %d MiB of bodies", grown/(1<<20), clients*each>>20)
	}
}

// TestStreamBeginningsMemory compares docs/deploy/sizing.md with replicas that send comments for
// long before the first event.
func TestStreamBeginningsMemory(t *testing.T) {
	const clients, comments = 300, 1 << 20
	var sent atomic.Int64
	comment := strings.Repeat(": "+strings.Repeat("x", 1020)+"\n\n", 16)
	release := make(chan struct{})
	replica := standIn{chat: func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for range comments / len(comment) {
			if _, err := io.WriteString(w, comment); err != nil {
				return
			}
		}
		w.(http.Flusher).Flush()
		sent.Add(1)
		<-release
		io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
	}}
	t.Setenv("WARMROUTE_ROUTING_QUEUE_REQUESTS", "0")
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", replica.start(t))
	before := p.resident()
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			resp, err := http.Post(p.url+"/v1/chat/completions", "application/json",
				strings.NewReader(`{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if answer, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(answer), "data: {") ||
				strings.Contains(string(answer), ": x") {
				t.Errorf("got %.100q, %v", answer, err)
			}
		})
	}
	p.awaitInFlight(clients)
	p.eventually("the comments are sent", func() bool { return sent.Load() == clients })
	p.awaitIdleCPU()
	grown := p.resident() - before
	close(release)
	all.Wait()
	// 24 KiB for a stream, twice for what the collector leaves for later, and half of that for the guide's tolerance.
	if grown > memoryCost*1.5*2*clients*(24<<10) {
		t.Errorf("memory grew by %.0f KiB for each stream", grown/clients/1024)
	} else {
		t.Logf("memory grew by %.0f KiB for each stream", grown/clients/1024)
	}
}

// awaitIdleCPU waits until the process has read what there is to read.
func (p *program) awaitIdleCPU() {
	p.t.Helper()
	var used float64
	p.eventually("the process idles", func() bool {
		last := used
		used = metricSum(p.t, p.admin, "process_cpu_seconds_total")
		return used-last < 0.01
	})
}

// TestHeaderLinesMemory compares docs/deploy/sizing.md with headers of many short lines that do
// not end.
func TestHeaderLinesMemory(t *testing.T) {
	const clients, lines = 200, 7500
	var header strings.Builder
	header.WriteString("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
	for i := range lines {
		fmt.Fprintf(&header, "%04x:a\r\n", i)
	}
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", standIn{}.start(t))
	p.ask(plainChat)
	before := p.resident()
	var sent sync.WaitGroup
	for range clients {
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		sent.Go(func() { io.WriteString(conn, header.String()) })
	}
	sent.Wait()
	p.awaitIdleCPU()
	grown := p.resident() - before
	// 128 KiB for a header, and half of that for the guide's tolerance.
	if grown > memoryCost*1.5*clients*(128<<10) {
		t.Errorf("memory grew by %.0f KiB for each connection", grown/clients/1024)
	} else {
		t.Logf("memory grew by %.0f KiB for each connection", grown/clients/1024)
	}
}
