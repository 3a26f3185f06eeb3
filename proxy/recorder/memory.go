package recorder

import (
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
	// chunkBytes is how many bytes of entries are removed together.
	chunkBytes    = 64 << 10
	chunkInterval = time.Minute

	// Half of Settings.Memory is for entries, nearly all of the rest for the numbers of blocks and conversations: a block takes
	// 8 bytes, and an entry of numbers about 26, in each of two generations.
	memoryPerKnownBlock        = 40
	memoryPerKnownConversation = 1024
)

// memory has the entries of requests that ended within the last memoryAge, or of as many of them as its bound allows. Its
// methods are called with mu held.
type memory struct {
	max int // bytes of the chunks; 0: nothing is kept

	mu     sync.Mutex // guards what follows
	chunks []chunk    // the oldest first; entries are added to the last one
	bytes  int        // of the chunks
	cutAt  time.Time  // when the last entry was added that was removed for lack of room
}

// chunk is entries, one behind the other. What is in it is not modified.
type chunk struct {
	entries      []byte
	began, ended time.Time // when the first and the last entry were added
}

// add adds a copy of an entry, and removes what is too old or too much.
func (m *memory) add(e *entry, now time.Time) {
	if m.max == 0 {
		return
	}
	last := len(m.chunks) - 1
	if last < 0 || len(m.chunks[last].entries) >= chunkBytes || now.Sub(m.chunks[last].began) >= chunkInterval {
		m.chunks = append(m.chunks, chunk{began: now})
		last++
	}
	c := &m.chunks[last]
	before := cap(c.entries)
	c.entries, c.ended = e.appendBinary(c.entries), now
	m.bytes += cap(c.entries) - before
	m.trim(now)
}

// trim removes the oldest chunks while they are too old or too much.
func (m *memory) trim(now time.Time) {
	n := 0
	for ; n < len(m.chunks); n++ {
		tooMuch := m.bytes > m.max
		if !tooMuch && now.Sub(m.chunks[n].ended) <= memoryAge {
			break
		}
		if tooMuch {
			m.cutAt = m.chunks[n].ended
		}
		m.bytes -= cap(m.chunks[n].entries)
	}
	m.chunks = slices.Delete(m.chunks, 0, n)
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
	Cut    bool              // there was no room for all of the last hour
	Models map[string]uint64 // the numbers of models, as their engines name them
	chunks [][]byte          // of entries
}

// Recent returns what is in memory; nil if nothing is to be kept there. Requests that ended within the last flushInterval
// may be missing.
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
		recent.chunks = append(recent.chunks, c.entries)
	}
	return recent
}

// WriteLines writes the first line and the lines of the requests, each with one call of Write. first has the fields of
// Header, in the same order, and possibly more.
func (r *Recent) WriteLines(w io.Writer, first any) error {
	line, err := json.Marshal(first)
	if err != nil {
		return err
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return err
	}
	var e entry
	for _, rest := range r.chunks {
		for len(rest) > 0 {
			if rest, err = e.parseBinary(rest); err != nil {
				return err
			}
			line = e.appendLine(line[:0])
			if _, err := w.Write(line); err != nil {
				return err
			}
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
