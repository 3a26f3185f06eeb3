package relay

import (
	"bytes"
	"net/http"
	"time"

	"warmroute/backends/transport"
)

// A client can choose the id of a stored response (request_id), and the replica knows responses by their ids alone. So a replica
// gets such an id behind a scope, a hash of the name of the client's key, and the client gets the replica's response without it.
// No table is needed to find the client's id again.

// RemoveScope replaces the body of a response by one without scope, in ids and in the messages of errors.
func RemoveScope(resp *http.Response, body Body, scope string) Body {
	if resp.ContentLength >= 0 {
		resp.ContentLength = -1
		resp.TransferEncoding = []string{"chunked"} // it is framed, by a length that is not the client's
	}
	unscoped := &UnscopedBody{Body: body, Scope: []byte(scope), Buf: make([]byte, ChunkBytes)}
	resp.Body = unscoped
	return unscoped
}

// UnscopedBody is a Body without the scope in it. It keeps bytes that may be the beginning of a scope until the next ones
// are there.
type UnscopedBody struct {
	Body
	Scope      []byte
	Buf        []byte
	ready      []byte // of Buf: not returned yet
	held       []byte // of Buf: may be the beginning of a scope
	afterScope bool   // a scope was removed at the end of what was returned
	err        error  // of the replica's body, to be returned after ready
}

// Read implements io.Reader. It reads from the replica at most once, so it may return 0 without an error.
func (b *UnscopedBody) Read(p []byte) (n int, err error) {
	if len(b.ready) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		from := copy(b.Buf, b.held)
		n, err := b.Body.Read(b.Buf[from:])
		if err == transport.ErrQuietTimeout { // the next read continues from here
			b.held = b.Buf[:from]
			return 0, err
		}
		b.err = err
		b.split(b.Buf[:from+n])
	}
	n = copy(p, b.ready)
	b.ready = b.ready[n:]
	return n, nil
}

// split removes the scopes from read, the beginning of Buf, and splits the rest into ready and held.
func (b *UnscopedBody) split(read []byte) {
	kept, rest := 0, read
	for len(rest) > 0 {
		next := 0
		if b.afterScope {
			next = 1 // the client's id begins here, and may look like a scope
		}
		next += indexScope(rest[next:], b.Scope)
		kept += copy(read[kept:], rest[:next])
		rest, b.afterScope = rest[next:], false
		if len(rest) < len(b.Scope) {
			break
		}
		rest, b.afterScope = rest[len(b.Scope):], true
	}
	if b.err != nil { // then rest is not the beginning of one
		kept += copy(read[kept:], rest)
		rest = nil
	}
	b.ready, b.held = read[:kept], rest
}

// indexScope returns the index of the first scope in p, or of a beginning of one at its end, or the length of p.
func indexScope(p, scope []byte) int {
	if i := bytes.Index(p, scope); i >= 0 {
		return i
	}
	i := max(0, len(p)-len(scope)+1)
	for i < len(p) && !bytes.HasPrefix(scope, p[i:]) {
		i++
	}
	return i
}

// WaitReadable implements Body.
func (b *UnscopedBody) WaitReadable(d time.Duration) (readable bool, err error) {
	if len(b.ready) > 0 || b.err != nil {
		return true, nil
	}
	return b.Body.WaitReadable(d)
}
