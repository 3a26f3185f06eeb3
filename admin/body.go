package admin

import (
	"io"
	"net/http"
	"time"
)

// lingering is how long the rest of a body is read for that nobody wants, so that
// its sender sees the answer and no reset; net/http would wait for ever.
const lingering = time.Second

// awaited is the body of a request. It has until a point in time to come, whether
// anybody reads it or net/http does after the answer.
type awaited struct {
	io.ReadCloser
	conn     *http.ResponseController
	patience time.Duration
	over     bool // it was read to its end, or nothing more of it will come
}

// await bounds the time that the body of r may take.
func (h *Handler) await(w http.ResponseWriter, r *http.Request) *awaited {
	b := &awaited{ReadCloser: r.Body, conn: http.NewResponseController(w), patience: h.patience}
	_ = b.conn.SetReadDeadline(time.Now().Add(h.patience)) // fails where there are none; then the body has to end by itself
	r.Body = b
	return b
}

// Read implements io.Reader. The answer, for which nobody asks before the body is
// there or has failed to come, has its time from then on. Once all is read, the
// connection is read only to see the client leave, which has no deadline.
func (b *awaited) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	_ = b.conn.SetWriteDeadline(time.Now().Add(b.patience))
	if err == io.EOF && !b.over {
		_ = b.conn.SetReadDeadline(time.Time{})
	}
	b.over = b.over || err != nil
	return n, err
}

// leave is for when the request is answered.
func (b *awaited) leave() {
	if !b.over {
		_ = b.conn.SetReadDeadline(time.Now().Add(lingering))
	}
}
