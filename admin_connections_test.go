package main

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Strangers may open as many connections to the admin listener as they like: old
// ones go, and an operator gets in.
func TestIdleConnectionsDoNotKeepAnOperatorOut(t *testing.T) {
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
