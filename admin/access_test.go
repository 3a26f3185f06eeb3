package admin

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// stalls sends a POST whose body does not come, and wants a response with that
// status, and the connection closed after it.
func (l *listener) stalls(path string, status int, says string) {
	l.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(l.url, "http://"))
	if err != nil {
		l.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	io.WriteString(conn, "POST "+path+" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	from := bufio.NewReader(conn)
	resp, err := http.ReadResponse(from, nil)
	if err != nil {
		l.t.Errorf("%s: %v", path, err)
		return
	}
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != status || !strings.Contains(string(body), says) || err != nil {
		l.t.Errorf("%s: status %d, %s, %v", path, resp.StatusCode, body, err)
	}
	if rest, err := from.ReadByte(); err != io.EOF {
		l.t.Errorf("%s: after the response %q, %v", path, rest, err)
	}
}

func TestStalledBody(t *testing.T) {
	a := askable(t)
	a.handler.timeout = 100 * time.Millisecond
	for range 5 { // the times to read and to write must not run out together
		a.stalls("/api/backends/gpu-0/drain", http.StatusBadRequest, "body is incomplete")
		a.stalls("/api/explain", http.StatusBadRequest, "body is incomplete")
		a.stalls("/api/sent?backend=gpu-0", http.StatusBadRequest, "body is incomplete")
	}
	a.stalls("/api/sent", http.StatusBadRequest, "missing backend")
	if a.fleet[0].Drained() {
		t.Error("a request that did not come drained a backend")
	}
}

// A client without the token cannot keep a connection open by never sending a body.
func TestStalledBodyOfRejectedRequest(t *testing.T) {
	l := listen(t, false, Options{Token: token})
	l.handler.timeout = time.Hour
	for _, path := range []string{drainPath, "/api/explain", "/"} {
		l.stalls(path, http.StatusUnauthorized, "admin_token")
	}
	l.stalls("/metrics", http.StatusUnauthorized, "admin_token")
}
