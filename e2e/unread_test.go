package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

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
