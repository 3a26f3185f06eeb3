package e2e

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// adminConnections is above what the admin listener keeps open.
const adminConnections = 64

// Strangers may open as many connections to the admin listener as they like: old
// ones go, and an operator gets in.
func TestAdminWithIdleConnections(t *testing.T) {
	t.Parallel()
	p := startProgram(t, "--config", startSimFleet(t, 1, 200_000).configFile(t, "timeouts: {read_header: 10m}").path)
	var open []net.Conn
	for range 2 * adminConnections {
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.admin, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(time.Minute))
		open = append(open, conn)
	}
	for i, conn := range open[:adminConnections] {
		if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	last := open[len(open)-1]
	io.WriteString(last, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(last), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("the last one: %v, %v", resp, err)
	}
}

// Nor do those keep one out that carry requests whose bodies do not come.
func TestAdminWithStalledBodies(t *testing.T) {
	t.Parallel()
	p := startProgram(t, "--config", startSimFleet(t, 1, 200_000).configFile(t, "").path)
	var open []net.Conn
	for i := range 2 * adminConnections {
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.admin, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(time.Minute))
		// It is asked to go on once the body is waited for.
		io.WriteString(conn, "POST /api/backends/none/drain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: "+
			"100-continue\r\nContent-Length: 100\r\n\r\n")
		if _, err := io.ReadFull(conn, make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		open = append(open, conn)
	}
	for i, conn := range open[:adminConnections] {
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) { // it may have been told that its body is late
			t.Fatalf("connection %d was kept: %v", i, err)
		}
	}
	resp, err := http.Get(p.admin + "/metrics")
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("a scrape: %v, %v", resp, err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
}
