package recorder

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// memoryAge is how long a request stays in memory.
	memoryAge = time.Hour
	// Lines in memory are compressed together, when they are so many or so old.
	chunkLineBytes = 256 << 10
	chunkInterval  = time.Minute

	// Half of Settings.Memory is for lines, nearly all of the rest for the numbers of blocks and sessions: an entry of
	// numbers takes about 26 bytes, in each of two generations.
	memoryPerKnownBlock   = 160
	memoryPerKnownSession = 1024
)

// memory has the lines of requests that ended within the last memoryAge, or of as many of them as its bound allows. Its
// methods are called with mu held.
type memory struct {
	max int // bytes of the chunks and of lines; 0: nothing is kept

	mu     sync.Mutex // guards what follows
	chunks []chunk    // the oldest first
	bytes  int        // of the chunks
	lines  []byte     // that are not compressed yet
	began  time.Time  // when the first of them was added
	zip    *gzip.Writer
	cutAt  time.Time // when the last line was added that was removed for lack of room
}

// chunk has lines that are compressed as one member of a gzip stream. It is not modified.
type chunk struct {
	member []byte
	ended  time.Time // when the last line was added
}

// addLine adds a copy of a line, and removes what is too old or too much.
func (m *memory) addLine(line []byte, now time.Time) {
	if m.max == 0 {
		return
	}
	if len(m.lines) == 0 {
		m.began = now
	}
	m.lines = append(m.lines, line...)
	if len(m.lines) >= chunkLineBytes || now.Sub(m.began) >= chunkInterval {
		c := chunk{m.compress(m.lines), now}
		m.chunks, m.bytes = append(m.chunks, c), m.bytes+len(c.member)
		m.lines = m.lines[:0]
	}
	m.trim(now)
}

// trim removes the oldest chunks while they are too old or too much.
func (m *memory) trim(now time.Time) {
	n := 0
	for ; n < len(m.chunks); n++ {
		tooMuch := m.bytes > max(0, m.max-chunkLineBytes)
		if !tooMuch && now.Sub(m.chunks[n].ended) <= memoryAge {
			break
		}
		if tooMuch {
			m.cutAt = m.chunks[n].ended
		}
		m.bytes -= len(m.chunks[n].member)
	}
	m.chunks = slices.Delete(m.chunks, 0, n)
}

// compress returns lines as a member of a gzip stream.
func (m *memory) compress(lines []byte) []byte {
	var out bytes.Buffer
	if m.zip == nil {
		m.zip, _ = gzip.NewWriterLevel(&out, gzip.BestSpeed) // the level is valid
	} else {
		m.zip.Reset(&out)
	}
	m.zip.Write(lines) // a bytes.Buffer accepts everything
	m.zip.Close()
	return bytes.Clone(out.Bytes())
}

// Header begins a recording, and each file of it.
type Header struct {
	Version     int   `json:"warmroute_record"`
	Started     int64 `json:"started_ms"` // of the timestamps, since 1970
	BlockBytes  int   `json:"block_bytes"`
	BlockTokens int   `json:"block_tokens"` // estimated
}

// Recent is what a Recorder has in memory. Its parts are not modified.
type Recent struct {
	Header
	Cut     bool              // there was no room for all of the last hour
	Models  map[string]uint64 // the numbers of models, as their engines name them
	members [][]byte
}

// Recent returns what is in memory; nil if nothing is to be kept there.
func (r *Recorder) Recent() *Recent {
	m := &r.memory
	if m.max == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.trim(now)
	recent := &Recent{Header: r.encode.header, Cut: now.Sub(m.cutAt) <= memoryAge, Models: r.encode.models.known()}
	for _, c := range m.chunks {
		recent.members = append(recent.members, c.member)
	}
	if len(m.lines) > 0 {
		recent.members = append(recent.members, m.compress(m.lines))
	}
	return recent
}

// WriteGzip writes the first line and the lines of the requests, compressed. first has the fields of Header, in the same
// order, and possibly more.
func (r *Recent) WriteGzip(w io.Writer, first any) error {
	line, err := json.Marshal(first)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(w)
	if _, err := zip.Write(append(line, '\n')); err != nil {
		return err
	}
	if err := zip.Close(); err != nil {
		return err
	}
	for _, member := range r.members {
		if _, err := w.Write(member); err != nil {
			return err
		}
	}
	return nil
}

// known returns the numbers that are remembered.
func (n *numbers[K]) known() map[K]uint64 {
	all := make(map[K]uint64, len(n.old)+len(n.young))
	maps.Copy(all, n.old)
	maps.Copy(all, n.young)
	return all
}
