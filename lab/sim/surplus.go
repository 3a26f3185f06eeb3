package sim

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
)

// keptConn is a connection and the last inference request on it. The handlers of a connection run
// one after another.
type keptConn struct {
	net.Conn
	lastID string // empty: there was none, or it had no id
}

// keptConnKey is the key of a request's keptConn in its context.
type keptConnKey struct{}

// withKeptConn is an http.Server's ConnContext.
func withKeptConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, keptConnKey{}, &keptConn{Conn: c})
}

// sendSurplusOnFault sends, while the fault Surplus is active, a second response to the request
// before r on its connection. The client takes it for the response to r.
func (s *Server) sendSurplusOnFault(r *http.Request) {
	conn, ok := r.Context().Value(keptConnKey{}).(*keptConn)
	if !ok {
		return
	}
	previous := conn.lastID
	if conn.lastID = r.Header.Get("X-Request-Id"); previous == "" {
		return
	}
	if _, active := s.faults.matchAndCount(true, Surplus); !active {
		return
	}
	body := fmt.Sprintf(`{"id":%q,"object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":"assistant",`+
		`"content":"surplus"},"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`,
		"chatcmpl-"+previous)
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body))
	_, _ = io.WriteString(conn, body) // if it fails, so does the response to r
}
