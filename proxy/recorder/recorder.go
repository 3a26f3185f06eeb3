// Package recorder records the shape of a proxy's traffic for replay: when each request
// arrived, the lengths of prompt and response, how it ended, and which prompts share a
// beginning. It writes no text, and no hash that could confirm a guessed prompt: blocks,
// conversations and models are numbered in the order of their first appearance.
//
// It keeps the last hour in memory, and writes to a file if one is named.
//
// A recording is lines of JSON, which replay.ParseTrace parses. The first line, which is
// repeated in each file, is
//
//	{"warmroute_record":2,"started_ms":…,"block_bytes":256,"block_tokens":64}
//
// and each further one is a request, written at its end:
//
//	timestamp      arrival, in ms since started_ms
//	input_length   tokens of the prompt, or of all prompts of a list; counted is
//	               true if the replica counted them and they are those of
//	               input_bytes
//	input_bytes    of the canonical prompt; of the first one of a list
//	extra_bytes    of further input, estimated: further prompts of a list, images,
//	               or a whole body of which only the length is known; absent: none
//	output_length  tokens of the response; 0: none, or unknown
//	cached_tokens  of the prompt; absent if the replica did not report them
//	block_runs     numbers of the prompt's full blocks, block_bytes each: for each run of
//	               consecutive numbers the first one, and how many they are
//	code           status sent to the client; 499: client disconnect; 502 and 504
//	               with an output_length: the response was truncated
//	stream, model, session, ttft_ms, duration_ms
package recorder

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"warmroute/prompt"
)

const (
	maxQueuedRequests = 4096
	maxQueuedBlocks   = 1 << 20 // of the queued requests: 8 MiB
	maxRequestBlocks  = 1 << 16 // of one prompt that are written
	maxSpareBlocks    = 4096    // of a list that is reused for another request
	batchRequests     = 64      // that are written together
	batchBlocks       = 1 << 16 // of queued requests, from which on they do not wait for more
	flushInterval     = time.Second
	openInterval      = 20 * time.Millisecond
	warnInterval      = time.Minute
)

// Limits of replay.ParseTrace. A request beyond them is dropped, because one invalid line
// would make the whole recording unusable.
const (
	maxInputBytes   = 16 << 20
	maxPromptTokens = 4 << 20
	maxOutputTokens = 1 << 20
	maxTimestamp    = 365 * 24 * time.Hour
)

// Settings say where a Recorder records to.
type Settings struct {
	Memory   int64  `mapstructure:"memory" range:"0..1GiB"`       // bytes for the requests of the last hour; 0: they are not kept
	File     string `mapstructure:"file"`                         // empty: none
	MaxBytes int64  `mapstructure:"max_bytes" range:"1MiB..1TiB"` // of one file; a full one is renamed to File.1
	Keep     int    `mapstructure:"keep" range:"0..1000"`         // number of full files that are kept
}

// Options configure a Recorder.
type Options struct {
	Settings
	BlockBytes int  // of canonical prompt in a block
	Wait       bool // another process has locked File and will release it
	Log        *slog.Logger
	Dropped    func() // called for each request that is not written
}

// Request describes a request. The caller of NewRequest owns it until Enqueue or Discard.
type Request struct {
	Arrived      time.Time
	Model        string
	Conversation uint64 // hash of its name; 0: none
	Streams      bool
	Bytes        int            // of canonical prompt
	ExtraBytes   int            // of further input, estimated
	Plain        bool           // PromptTokens, if known, are those of Bytes
	Blocks       []prompt.Block // of Bytes; filled by appending
	PromptTokens int            // as reported by the replica; 0: not reported
	CachedTokens int
	CachedKnown  bool
	OutputTokens int
	Code         int
	TTFT         time.Duration // 0: no content, or not a stream
	Duration     time.Duration
}

// Recorder records requests to memory and to a file. NewRequest, Enqueue and Discard are safe for concurrent use
// and do not block.
type Recorder struct {
	log     *slog.Logger
	dropped func()

	queue  chan *Request
	due    chan struct{} // has a value when the queue has a batch
	blocks atomic.Int64  // of the queued requests
	ended  atomic.Bool   // nobody reads the queue
	spare  sync.Pool     // of *Request

	memory memory
	encode encoder // its numbers are guarded by memory.mu

	// Used by Run only.
	out      *files // nil: none
	line     []byte
	warnings rate.Sometimes // are logged
}

// New opens the file, if there is one, unless o.Wait is set. Nothing is written before Run.
func New(o Options) (*Recorder, error) {
	var out *files
	knownBlocks, knownConversations := int(o.Memory/memoryPerKnownBlock), int(o.Memory/memoryPerKnownConversation)
	if o.File != "" {
		out = &files{path: o.File, max: o.MaxBytes, keep: o.Keep}
		knownBlocks, knownConversations = minKnownBlocks, minKnownConversations
		if !o.Wait {
			if err := out.open(); err != nil {
				return nil, err
			}
		}
	}
	return &Recorder{
		log:      o.Log,
		dropped:  o.Dropped,
		queue:    make(chan *Request, maxQueuedRequests),
		due:      make(chan struct{}, 1),
		spare:    sync.Pool{New: func() any { return new(Request) }},
		out:      out,
		memory:   memory{max: int(o.Memory / 2)},
		encode:   newEncoder(time.Now(), o.BlockBytes, knownBlocks, knownConversations),
		warnings: rate.Sometimes{Interval: warnInterval},
	}, nil
}

// NewRequest returns an empty Request.
func (r *Recorder) NewRequest() *Request { return r.spare.Get().(*Request) }

// Discard releases a Request that is not written.
func (r *Recorder) Discard(q *Request) {
	blocks := q.Blocks[:0]
	if cap(blocks) > maxSpareBlocks {
		blocks = nil
	}
	*q = Request{Blocks: blocks}
	r.spare.Put(q)
}

// Enqueue queues a Request to be written. If the queue is full, it is dropped.
func (r *Recorder) Enqueue(q *Request) {
	q.Blocks = q.Blocks[:min(len(q.Blocks), maxRequestBlocks)]
	blocks := r.blocks.Add(int64(len(q.Blocks)))
	if blocks <= maxQueuedBlocks {
		select {
		case r.queue <- q:
			if len(r.queue) >= batchRequests || blocks >= batchBlocks {
				select {
				case r.due <- struct{}{}:
				default:
				}
			}
			// Run sets it before it reads the queue for the last time.
			if r.ended.Load() {
				r.dropQueued()
			}
			return
		default:
		}
	}
	r.drop(q)
}

// drop drops a Request whose blocks were counted.
func (r *Recorder) drop(q *Request) {
	r.blocks.Add(-int64(len(q.Blocks)))
	r.dropped()
	r.Discard(q)
}

// dropQueued drops all queued requests.
func (r *Recorder) dropQueued() {
	for {
		select {
		case q := <-r.queue:
			r.drop(q)
		default:
			return
		}
	}
}

// Run writes requests until ctx is done, and then those in the queue. Later ones are
// dropped. It must be called once. It wakes up for a batch of requests, or after flushInterval: to wake up for each
// takes a twentieth of the time of a short request.
func (r *Recorder) Run(ctx context.Context) {
	r.openFileWithRetry(ctx)
	ticks := time.NewTicker(flushInterval)
	defer ticks.Stop()
	for ctx.Err() == nil {
		select {
		case <-r.due:
			r.writeQueued()
		case <-ticks.C:
			r.writeQueued()
			r.flushFile()
		case <-ctx.Done():
		}
	}
	for len(r.queue) > 0 {
		r.writeQueued()
	}
	if r.flushFile(); r.out != nil {
		r.out.close()
	}
	r.ended.Store(true)
	r.dropQueued()
}

// writeQueued writes the queued requests. Nobody else receives.
func (r *Recorder) writeQueued() {
	for n := len(r.queue); n > 0; n-- {
		r.write(<-r.queue)
	}
}

// openFileWithRetry waits until another process releases the file, if there is one, and opens it.
func (r *Recorder) openFileWithRetry(ctx context.Context) {
	if r.out == nil || r.out.file != nil {
		return
	}
	r.warnings.Do(func() {}) // a short wait is normal: no warning before warnInterval
	ticks := time.NewTicker(openInterval)
	defer ticks.Stop()
	for r.out.file == nil && ctx.Err() == nil {
		if err := r.out.open(); err != nil {
			r.countUnwrittenLinesAndWarn(err)
			select {
			case <-ticks.C:
			case <-ctx.Done():
			}
		}
	}
}

// write encodes a Request and keeps its entry, or drops a Request that is not valid.
func (r *Recorder) write(q *Request) {
	if !r.encode.isReplayable(q) {
		r.drop(q)
		return
	}
	e := r.encodeToMemory(q)
	r.blocks.Add(-int64(len(q.Blocks)))
	r.Discard(q)
	if r.out != nil {
		r.line = e.appendLine(r.line[:0])
		r.countUnwrittenLinesAndWarn(r.out.addLine(r.line, r.encode.headerLine))
	}
}

// encodeToMemory encodes a Request, adds its entry to the memory and returns it. It is valid until the next call.
func (r *Recorder) encodeToMemory(q *Request) *entry {
	r.memory.mu.Lock()
	defer r.memory.mu.Unlock()
	e := r.encode.encode(q)
	r.memory.add(e, time.Now())
	return e
}

// flushFile writes what is buffered for the file, if there is one.
func (r *Recorder) flushFile() {
	if r.out != nil {
		r.countUnwrittenLinesAndWarn(r.out.flush())
	}
}

// countUnwrittenLinesAndWarn counts the lines that the file could not write since the last call. It logs err, unless it is nil, at
// most once in warnInterval.
func (r *Recorder) countUnwrittenLinesAndWarn(err error) {
	for ; r.out.unwritten > 0; r.out.unwritten-- {
		r.dropped()
	}
	if err != nil {
		r.warnings.Do(func() { r.log.Warn("recording failed", "err", err) })
	}
}
