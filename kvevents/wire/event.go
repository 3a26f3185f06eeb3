// Package wire receives the events that vLLM publishes about its KV cache: which blocks of
// tokens a replica has stored and removed.
//
// A Subscriber follows one publisher (one data-parallel rank of a replica) over ZeroMQ and calls
// a Handler in the order of publication. It fills gaps from the publisher's replay endpoint, and
// tells the Handler if it cannot.
package wire

// Batch is what a publisher sends at once, mostly the events of one scheduler step.
type Batch struct {
	Rank   int // data-parallel rank; -1: not given
	Events []Event
}

// Kind is the type of an Event.
type Kind uint8

const (
	Stored  Kind = iota // BlockStored: blocks can be reused from now on
	Removed             // BlockRemoved: blocks are gone from the medium
	Cleared             // AllBlocksCleared: the GPU holds no blocks any more; other media are untouched
)

// Medium is where blocks are kept.
type Medium uint8

const (
	GPU     Medium = iota // also if an event does not say
	CPU                   // host memory
	Storage               // everything else
)

// SpecKind is the kind of a KV cache group's layers. Of hybrid models, which publish the same
// tokens once per group, only the groups of full attention mean a usable prefix.
type SpecKind uint8

const (
	SpecUnknown SpecKind = iota // not given, as in all but Stored events
	SpecFullAttention
	SpecMLAAttention
	SpecSlidingWindow
	SpecSlidingWindowMLA
	SpecMamba
	SpecChunkedLocalAttention
	SpecSinkFullAttention
	SpecEncoderOnlyAttention
	SpecCrossAttention
	SpecOther // a name that is not in this list
)

// Event is one change of a replica's KV cache.
type Event struct {
	Kind      Kind
	Medium    Medium
	SpecKind  SpecKind // Stored only
	HasParent bool     // Parent is set; else the first block is the head of a sequence
	Remote    bool     // the blocks are kept by another replica ("locality": "REMOTE")
	Group     int      // KV cache group; 0 if not given

	// Hashes name the blocks, in order of the sequence. They are the publisher's: the low 64
	// bits of each, which other replicas share only if they hash alike.
	Hashes []uint64
	Parent uint64 // the block before the first

	// Tokens are those of the blocks (the low 32 bits of each id). There can be fewer or more than
	// len(Hashes)*BlockSize: none where an earlier event of the GPU gave them, fewer for a partial
	// block, more where blocks without content were left out.
	Tokens    []uint32
	BlockSize int // in tokens, of this event; 0 if not given

	// Extra has for each block HashExtraKeys of what its hash contains besides tokens, such as
	// the LoRA name, media and the cache salt; 0 for nothing. It is nil if no block has any,
	// else as long as the list that was sent, which should be that of Hashes.
	Extra []uint64

	LoRA    string // lora_name; "" for the base model
	Session string // session_id of the request that caused the event; "" if not given or too long
}
