package relay

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"warmroute/proxy/api"
)

// ChunkBytes is how much of a stream is read at a time.
const ChunkBytes = 4 << 10

// LineWriter writes a stream of server-sent events in whole lines, as soon as they are complete: half a line of
// a crashing replica would hide the error event that follows. A line that names an event is written with the next
// one, so that the event may still be withheld. A line longer than a chunk is written as it comes.
type LineWriter struct {
	To      io.Writer
	Chunks  *sync.Pool // of *[]byte
	chunk   *[]byte    // borrowed from Chunks; nil: none
	Pending int        // bytes of chunk that are not written yet
	tail    [3]byte    // the last bytes written
}

// NewLineWriter returns a writer to to, which takes its memory from chunks, of *[]byte of ChunkBytes.
func NewLineWriter(to io.Writer, chunks *sync.Pool) LineWriter {
	return LineWriter{To: to, Chunks: chunks}
}

func (l *LineWriter) borrowChunk() []byte {
	if l.chunk == nil {
		l.chunk = l.Chunks.Get().(*[]byte)
	}
	return *l.chunk
}

// FreeSpace returns the memory to read the next bytes of the stream to, before WriteCompleteLines.
func (l *LineWriter) FreeSpace() []byte { return l.borrowChunk()[l.Pending:] }

// ReleaseChunkIfEmpty returns the chunk to the pool unless bytes of it are pending.
func (l *LineWriter) ReleaseChunkIfEmpty() {
	if l.Pending == 0 {
		l.ReleaseChunk()
	}
}

// ReleaseChunk returns the chunk to the pool. What is pending is lost.
func (l *LineWriter) ReleaseChunk() {
	if l.chunk != nil {
		l.Chunks.Put(l.chunk)
		l.chunk = nil
	}
}

// WriteCompleteLines writes the lines that are complete with the bytes that were read to FreeSpace, and keeps the
// rest pending.
func (l *LineWriter) WriteCompleteLines(added int) (err error) {
	defer l.ReleaseChunkIfEmpty()
	buf, have := l.borrowChunk(), l.Pending+added
	whole := completeLinesLength(buf[:have])
	if whole == 0 && have == len(buf) {
		whole = have
	}
	if whole > 0 {
		err = l.writeAndKeepTail(buf[:whole])
	}
	l.Pending = copy(buf, buf[whole:have])
	return err
}

// WriteAllButLast writes what is pending and what was read to FreeSpace, without the last withheld bytes, which
// begin with an event that the client is not to get. If its beginning was written before, the rest of it follows.
// Nothing stays pending.
func (l *LineWriter) WriteAllButLast(added int, withheld int64) error {
	defer l.ReleaseChunkIfEmpty()
	have := l.Pending + added
	l.Pending = 0
	if withheld <= int64(have) {
		have -= int(withheld)
	}
	if have == 0 {
		return nil
	}
	return l.writeAndKeepTail(l.borrowChunk()[:have])
}

// completeLinesLength returns the length of the complete lines that b begins with, without a last one that names
// an event.
func completeLinesLength(b []byte) int {
	end := bytes.LastIndexAny(b, "\r\n") + 1
	if end == 0 {
		return 0
	}
	text := end - 1
	if text > 0 && b[text] == '\n' && b[text-1] == '\r' {
		text--
	}
	if last := bytes.LastIndexAny(b[:text], "\r\n") + 1; bytes.HasPrefix(b[last:], []byte("event:")) {
		return last
	}
	return end
}

// WriteBeginning writes what came before the stream was committed.
func (l *LineWriter) WriteBeginning(head []byte) error {
	defer l.ReleaseChunkIfEmpty()
	buf, whole := l.borrowChunk(), completeLinesLength(head)
	if len(head)-whole >= len(buf) {
		whole = len(head)
	}
	l.Pending = copy(buf, head[whole:])
	return l.writeAndKeepTail(head[:whole])
}

// FlushPending writes what is pending at the end of the stream.
func (l *LineWriter) FlushPending() {
	if l.Pending > 0 {
		l.writeAndKeepTail(l.borrowChunk()[:l.Pending])
	}
}

// writeAndKeepTail writes b, and keeps its end for WriteKeepAlive.
func (l *LineWriter) writeAndKeepTail(b []byte) error {
	n := min(len(b), len(l.tail))
	copy(l.tail[:], l.tail[n:])
	copy(l.tail[len(l.tail)-n:], b[len(b)-n:])
	_, err := l.To.Write(b)
	return err
}

// MissingLineEnds returns the line ends that the last event written lacks.
func (l *LineWriter) MissingLineEnds() string {
	switch tail := string(l.tail[:]); {
	case l.tail == [3]byte{}, strings.HasSuffix(tail, "\n\n"), strings.HasSuffix(tail, "\r\r"), strings.HasSuffix(tail, "\n\r"),
		tail == "\n\r\n", tail == "\r\r\n":
		return ""
	case tail[2] == '\n':
		return "\n"
	}
	return "\n\n"
}

// ChunkIntervals observes the time between the chunks of a stream that carry events, by when each was written:
// reading the clock once more would cost more than the rest.
type ChunkIntervals struct {
	Observer prometheus.Observer
	Last     time.Time // zero: there was none yet
}

// Observe records a chunk that was written at a time.
func (g *ChunkIntervals) Observe(at time.Time) {
	if !g.Last.IsZero() {
		g.Observer.Observe(at.Sub(g.Last).Seconds())
	}
	g.Last = at
}

// Body is the body of a replica's response.
type Body interface {
	io.ReadCloser

	// SetIdleTimeout makes reads fail with os.ErrDeadlineExceeded after a wait of d.
	SetIdleTimeout(d time.Duration)
	// SetQuietTimeout makes Read return transport.ErrQuietTimeout after a wait of d; 0: never.
	SetQuietTimeout(d time.Duration)
	// WaitReadable waits at most d, and reports whether Read would not wait.
	WaitReadable(d time.Duration) (bool, error)
	// Uploaded reports whether the request's body is not needed any more.
	Uploaded() bool
	// ForbidReuse keeps the connection from other requests until AllowReuse; Close closes it before.
	ForbidReuse()
	// AllowReuse ends ForbidReuse.
	AllowReuse()
}

// WriteKeepAlive writes a keep-alive event, unless it would split another one.
func (l *LineWriter) WriteKeepAlive(event string) error {
	if l.MissingLineEnds() != "" || l.tail[1] == '\n' && l.tail[2] == '\r' { // a line feed may follow
		return nil
	}
	_, err := l.To.Write([]byte(event))
	return err
}

// KeepAliveEvent returns what clients of that format ignore, and what is traffic to
// intermediaries.
func KeepAliveEvent(f api.Format) string {
	if f == api.MessagesFormat {
		return MessagesPing
	}
	return KeepAliveComment
}

const (
	// KeepAliveComment has no empty line after it: some SDKs take that for an event without data, and fail.
	KeepAliveComment = ": keep-alive\n"
	MessagesPing     = "event: ping\ndata: {\"type\": \"ping\"}\n\n"
)
