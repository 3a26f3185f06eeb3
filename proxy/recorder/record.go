// Package recorder writes down what a proxy's traffic was like, so that it can be
// replayed: when each request came, how long prompt and answer were, how it
// ended, and which prompts began alike. It writes no text, and no hash by which
// a guessed prompt could be confirmed: blocks, sessions and models are numbered
// in the order in which they were first seen.
//
// A recording is lines of JSON, and replay.ParseTrace reads it. The first line,
// which is repeated in each file, is
//
//	{"warmroute_record":1,"started_ms":…,"block_bytes":256,"block_tokens":64}
//
// and each further one a request, written at its end:
//
//	timestamp      arrival, in ms since started_ms
//	input_length   tokens of the prompt, or of all prompts of a list; counted is
//	               true where the replica counted them and they are those of
//	               input_bytes
//	input_bytes    of the canonical prompt; of a list, the first's
//	extra_bytes    of what is asked for beside it, about: further prompts of a
//	               list, images, and all of a body that is read for its length
//	               alone; absent: nothing
//	output_length  tokens of the answer; 0: none came, or nobody knows
//	cached_tokens  of the prompt; absent where the replica did not tell
//	hash_ids       numbers of the prompt's full blocks, block_bytes each
//	code           what the client was answered; 499: it left; 502 and 504 with an
//	               output_length: the answer broke off
//	stream, model, session, ttft_ms, duration_ms
package recorder

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/router/prompt"
)

const (
	queueRequests = 4096    // that may wait to be written
	queueBlocks   = 1 << 20 // … and their blocks: 8 MiB
	// mostBlocks is how many blocks of one prompt are written.
	mostBlocks = 1 << 16
	// keepBlocks is the longest list of blocks that is kept for another request.
	keepBlocks = 4096
	flushEvery = time.Second
	openEvery  = 20 * time.Millisecond
	warnEvery  = time.Minute
)

// What replay.ParseTrace takes. A request beyond it is dropped: one line that
// cannot be read would spoil all of a recording.
const (
	mostBytes  = 16 << 20
	mostPrompt = 4 << 20 // tokens
	mostAnswer = 1 << 20 // tokens
	mostStamp  = 365 * 24 * time.Hour
)

// Options are what a Recorder is made of.
type Options struct {
	File       string
	MaxBytes   int64 // of one file; a full one becomes File.1
	Keep       int   // full ones that are kept
	BlockBytes int   // of canonical prompt in a block
	Wait       bool  // another process has File, and lets go of it soon
	Log        *slog.Logger
	Dropped    func() // a request was not written: too many came at once, it is larger than can be replayed, or the disk is full
}

// Request is what there is to write of one request. It belongs to whom Begin
// gave it until Add or Forget.
type Request struct {
	Arrived      time.Time
	Model        string
	Session      uint64 // hash of its name; 0: none
	Streams      bool
	Bytes        int            // of canonical prompt
	ExtraBytes   int            // of what was asked for beside it
	Plain        bool           // PromptTokens, where known, are those of Bytes
	Blocks       []prompt.Block // of Bytes; filled by appending
	PromptTokens int            // as the replica counted them; 0: it did not
	CachedTokens int
	CachedKnown  bool
	AnswerTokens int
	Code         int
	TTFT         time.Duration // 0: no content came, or not as a stream
	Duration     time.Duration
}

// Recorder writes requests to a file. Begin, Add and Forget are safe for
// concurrent use and never wait.
type Recorder struct {
	log     *slog.Logger
	dropped func()

	queue  chan *Request
	queued atomic.Int64 // blocks of what is in queue
	ended  atomic.Bool  // nobody writes any more
	spare  sync.Pool    // of *Request

	// Below is Run's.
	out    *files
	encode encoder
	warned time.Time
}

// New opens the file, unless it has to wait for it. Nothing is written before Run.
func New(o Options) (*Recorder, error) {
	out := &files{path: o.File, max: o.MaxBytes, keep: o.Keep}
	if !o.Wait {
		if err := out.open(); err != nil {
			return nil, err
		}
	}
	return &Recorder{
		log:     o.Log,
		dropped: o.Dropped,
		queue:   make(chan *Request, queueRequests),
		spare:   sync.Pool{New: func() any { return new(Request) }},
		out:     out,
		encode:  newEncoder(time.Now(), o.BlockBytes),
	}, nil
}

// Begin returns an empty Request.
func (r *Recorder) Begin() *Request { return r.spare.Get().(*Request) }

// Forget takes back a Request that is not to be written.
func (r *Recorder) Forget(q *Request) {
	blocks := q.Blocks[:0]
	if cap(blocks) > keepBlocks {
		blocks = nil
	}
	*q = Request{Blocks: blocks}
	r.spare.Put(q)
}

// Add has a Request written. When more come than the disk takes, it is dropped.
func (r *Recorder) Add(q *Request) {
	q.Blocks = q.Blocks[:min(len(q.Blocks), mostBlocks)]
	n := int64(len(q.Blocks))
	if r.queued.Add(n) <= queueBlocks {
		select {
		case r.queue <- q:
			// Looked at after it was queued, and set before Run looks last: one of
			// the two sees the other.
			if r.ended.Load() {
				r.discard()
			}
			return
		default:
		}
	}
	r.drop(q)
}

// drop takes back a Request that was counted in queued.
func (r *Recorder) drop(q *Request) {
	r.queued.Add(-int64(len(q.Blocks)))
	r.dropped()
	r.Forget(q)
}

// discard drops all that is queued.
func (r *Recorder) discard() {
	for {
		select {
		case q := <-r.queue:
			r.drop(q)
		default:
			return
		}
	}
}

// Run writes until ctx is done, and then what was added before. What is added
// after that is dropped, and counted. Call it once.
func (r *Recorder) Run(ctx context.Context) {
	r.await(ctx)
	ticks := time.NewTicker(flushEvery)
	defer ticks.Stop()
	for ctx.Err() == nil {
		select {
		case q := <-r.queue:
			r.write(q)
		case <-ticks.C:
			r.check(r.out.flush())
		case <-ctx.Done():
		}
	}
	for {
		select {
		case q := <-r.queue:
			r.write(q)
			continue
		default:
		}
		break
	}
	r.check(r.out.flush())
	r.out.close()
	r.ended.Store(true)
	r.discard()
}

// await opens a file that was another process's. Meanwhile requests queue.
func (r *Recorder) await(ctx context.Context) {
	if r.out.file != nil {
		return
	}
	r.warned = time.Now() // that it takes a moment is as it should be
	ticks := time.NewTicker(openEvery)
	defer ticks.Stop()
	for r.out.file == nil && ctx.Err() == nil {
		if err := r.out.open(); err != nil {
			r.check(0, err)
			select {
			case <-ticks.C:
			case <-ctx.Done():
			}
		}
	}
}

func (r *Recorder) write(q *Request) {
	if !r.encode.fits(q) {
		r.drop(q)
		return
	}
	line := r.encode.request(q)
	r.queued.Add(-int64(len(q.Blocks)))
	r.Forget(q)
	r.check(r.out.add(line, r.encode.header))
}

// check counts the lines that were lost to an error, and tells of it now and then.
func (r *Recorder) check(lost int, err error) {
	for range lost {
		r.dropped()
	}
	if now := time.Now(); err != nil && now.Sub(r.warned) > warnEvery {
		r.warned = now
		r.log.Warn("traffic is not recorded", "reason", err.Error())
	}
}
