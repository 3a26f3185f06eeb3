// Package wire receives the events that vLLM publishes about its KV cache: which blocks of
// tokens a replica has stored and removed.
//
// A Subscriber follows one publisher (one data-parallel rank of a replica) over ZeroMQ and calls
// a Handler in the order of publication. It fills gaps from the publisher's replay endpoint, and
// tells the Handler if it cannot.
package wire

// Kind is the type of an Event.
type Kind uint8

const (
	Stored  Kind = iota // BlockStored: blocks can be reused from now on
	Removed             // BlockRemoved: blocks are gone from the medium
	Cleared             // AllBlocksCleared: the GPU holds no blocks any more; other media are untouched
)

// Event is one change of a replica's KV cache.
type Event struct {
	Kind      Kind
	HasParent bool // Parent is set; else the first block is the head of a sequence
	Offloaded bool // the blocks are in another medium than the GPU, such as host memory
	Remote    bool // the blocks are kept by another replica ("locality": "REMOTE")
	// NoPrefix: the KV cache group is one whose blocks do not mean alone that a prefix can be reused, as that of a
	// sliding window, or of the states of linear attention. Hybrid models publish the same tokens once per group, and
	// leave out those blocks of such a group that they do not keep. Stored only.
	NoPrefix bool
	Group    int // KV cache group; 0 if not given
	Window   int // in tokens, of a group of sliding-window attention; 0: it is another one. Stored only.

	// Hashes name the blocks, in order of the sequence. They are the publisher's: the low 64
	// bits of each, which other replicas share only if they hash alike.
	Hashes []uint64
	Parent uint64 // the block before the first

	// Tokens are those of the blocks (the low 32 bits of each id). There can be fewer or more than
	// len(Hashes)*BlockSize: none where an earlier event of the GPU gave them, fewer for a partial
	// block, more where blocks without content were left out.
	Tokens    []uint32
	BlockSize int // in tokens, of this event; 0 if not given

	// Extra has for each block a hash of what the block's own hash contains besides tokens, such as
	// the LoRA name, media and the cache salt; 0 for nothing. It is nil if no block has any,
	// else as long as the list that was sent, which should be that of Hashes.
	Extra []uint64

	LoRA    string // lora_name; "" for the base model
	Session string // session_id of the request that caused the event; "" if not given or too long
}
