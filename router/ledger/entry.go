package ledger

import (
	"time"

	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// MaxSequences is how many sequences of one request count at most; a client may set any n.
const MaxSequences = 1024

// RequestKind is whether a replica serves a client's whole request, or one of the two requests of a split one.
type RequestKind uint8

const (
	WholeRequest   RequestKind = iota
	PrefillRequest             // of a split request
	DecodeRequest              // likewise: the replica reads the KV cache of the one that has done the prefill
)

// Entry is a request that was sent to a backend and has not ended. It must not be copied after Begin.
type Entry struct {
	Slot       int
	SentAt     time.Time
	Prediction estimate.Prediction

	Adapter         string // LoRA adapter; "": none
	Class           queue.Class
	Streams         bool // its first event can be seen
	NonGenerative   bool // its endpoint generates no text
	OfPeer          bool // a peer has sent it
	MaxOutputTokens int  // 0: not known
	Conversation    queue.ConversationID
	RequestKind     RequestKind

	account *account       // of its backend, for as long as that is in the fleet
	blocks  []prompt.Block // of the prompt, for Rollback; nil once the prefill is over
	head    prompt.Head    // of the prompt
	pin     index.Pin
	// expected are the blocks in which checkpoints were added when it was sent.
	expected  [2]int32
	kv        kvUse
	prefilled bool
	steps     entrySteps
	unsent    bool // it is a DecodeRequest of this router that was not sent yet
	untimed   bool // a peer has sent it, and when it was sent or when something happened to it is not known
}

// Prompt is what Begin needs of a request's prompt.
type Prompt struct {
	Blocks               []prompt.Block
	Bytes                int // of canonical prompt
	BytesPerToken        float64
	UnindexedMediaTokens int64 // of media, beyond those of their blocks
}

// End is how a request ended on its backend.
type End int

const (
	Completed          End = iota // the response was complete
	NotProcessed                  // the engine did not work on it: connect error, 4xx, 5xx, or the replica died before its first output
	ClientDisconnected            // the client closed the connection
	Truncated                     // the response ended early
)

// Outcome describes a finished request. Zero fields are unknown.
type Outcome struct {
	End          End
	Failed       bool // the backend failed: no connection, no response in time, 5xx, response truncated
	QueueFull    bool // it failed with a 503: its queue may be full
	Stalled      bool // it made no progress for so long that another backend is tried
	Stopping     bool // the replica reports that it accepts no more requests since it is about to stop
	OutputTokens int  // of all sequences together
	PromptTokens int  // as the engine counted them
	CachedTokens int  // of PromptTokens
	CachedKnown  bool // the replica reports CachedTokens, so 0 means none
	// Reply are the blocks that follow the prompt's when the next turn sends the output back.
	Reply []prompt.Block
	// ReplyTailBytes is how many bytes of the output follow Reply.
	ReplyTailBytes int
}

// IsPrefilled reports whether the prefill of the request is over.
func (e *Entry) IsPrefilled() bool { return e.prefilled }

// attendedTokens returns how many tokens the uncached tokens of the prompt attend to, all together:
// each to those before it.
func (e *Entry) attendedTokens() float64 {
	return policy.AttendedTokens(e.Prediction.PromptTokens, e.Prediction.Uncached)
}

// MaxTokens returns how many tokens the output can have, all sequences together.
func (e *Entry) MaxTokens() float64 {
	most := float64(estimate.MaxOutputTokens)
	if e.MaxOutputTokens > 0 {
		most = min(most, float64(e.MaxOutputTokens))
	}
	return most * float64(e.Prediction.Sequences)
}
