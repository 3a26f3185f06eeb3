package proxy

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"time"

	"warmroute/backends/transport"
	"warmroute/prompt"
)

// A client can choose the id of a stored response (request_id), and the replica knows responses by their ids alone. So a replica
// gets such an id behind a scope, a hash of the name of the client's key, and the client gets the replica's response without it.
// No table is needed to find the client's id again.

// scopeOf returns the scope of the ids that clients with the key of that name choose. JSON and URLs leave its characters as they
// are, and it begins with resp_, which vLLM before its pull request 25428 requires of an id.
func scopeOf(keyName string) string {
	hash := sha256.Sum256([]byte(keyName))
	return "resp_wr-" + hex.EncodeToString(hash[:16]) + "-"
}

// scopeEdits returns the edits that insert the scope before each id in the body that has one at the replica.
func (s *storedInput) scopeEdits() (edits []prompt.Edit) {
	if s.scope == "" {
		return nil
	}
	if s.chosenIDAt > 0 {
		edits = append(edits, prompt.Edit{Start: s.chosenIDAt, End: s.chosenIDAt, Text: s.scope})
	}
	if s.refersToAt > 0 && s.replicaID != s.refersTo {
		edits = append(edits, prompt.Edit{Start: s.refersToAt, End: s.refersToAt, Text: s.scope})
	}
	return edits
}

// removeScope replaces the body of a response by one without scope, in ids and in the messages of errors.
func removeScope(resp *http.Response, body replicaBody, scope string) replicaBody {
	if resp.ContentLength >= 0 {
		resp.ContentLength = -1
		resp.TransferEncoding = []string{"chunked"} // it is framed, by a length that is not the client's
	}
	unscoped := &unscopedBody{replicaBody: body, scope: []byte(scope), buf: make([]byte, chunkBytes)}
	resp.Body = unscoped
	return unscoped
}

// unscopedBody is a replicaBody without the scope in it. It keeps bytes that may be the beginning of a scope until the next ones
// are there.
type unscopedBody struct {
	replicaBody
	scope      []byte
	buf        []byte
	ready      []byte // of buf: not returned yet
	held       []byte // of buf: may be the beginning of a scope
	afterScope bool   // a scope was removed at the end of what was returned
	err        error  // of the replica's body, to be returned after ready
}

// Read implements io.Reader. It reads from the replica at most once, so it may return 0 without an error.
func (b *unscopedBody) Read(p []byte) (n int, err error) {
	if len(b.ready) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		from := copy(b.buf, b.held)
		n, err := b.replicaBody.Read(b.buf[from:])
		if err == transport.ErrQuietTimeout { // the next read goes on
			b.held = b.buf[:from]
			return 0, err
		}
		b.err = err
		b.split(b.buf[:from+n])
	}
	n = copy(p, b.ready)
	b.ready = b.ready[n:]
	return n, nil
}

// split removes the scopes from read, the beginning of buf, and splits the rest into ready and held.
func (b *unscopedBody) split(read []byte) {
	kept, rest := 0, read
	for len(rest) > 0 {
		next := 0
		if b.afterScope {
			next = 1 // the client's id begins here, and may look like a scope
		}
		next += indexScope(rest[next:], b.scope)
		kept += copy(read[kept:], rest[:next])
		rest, b.afterScope = rest[next:], false
		if len(rest) < len(b.scope) {
			break
		}
		rest, b.afterScope = rest[len(b.scope):], true
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

// WaitReadable implements replicaBody.
func (b *unscopedBody) WaitReadable(d time.Duration) (readable bool, err error) {
	if len(b.ready) > 0 || b.err != nil {
		return true, nil
	}
	return b.replicaBody.WaitReadable(d)
}
