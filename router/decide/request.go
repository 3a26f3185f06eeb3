package decide

import (
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/health"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// Request is what the decision needs of one request. Where the router has a catalog, Backends is updated when
// they could not take the request, or it is routed again.
type Request struct {
	Backends  []*backends.Backend // those that serve its model
	CatalogID string              // its model's ID in the catalog; "": Backends stay as they are
	// AwaitsModel: it waits for a backend that lists its model, although backends list others.
	AwaitsModel bool
	Model       string // as the engine knows it; token ratios are learned by it
	Adapter     string // LoRA adapter that it is for; "": none
	Endpoint    backends.Endpoint

	Blocks    []prompt.Block // unchanged until the Reservation's Release
	Forks     []prompt.Fork  // where Blocks part from those of other layouts
	Bytes     int            // of canonical prompt, all sequences included
	BodyBytes int            // of memory that it uses while it is queued
	Sequences int            // that the engine will run for it
	Streams   bool           // its first event can be seen
	Media     bool           // part of its Bytes is not text
	// MediaItems are those of its Bytes, as far as their places there are known; unchanged like Blocks.
	MediaItems []prompt.MediaPosition

	// TextClass is the class of its prompt's text, by which and Model the bytes per token are learned.
	TextClass prompt.TextClass

	// Stored says that Backends is the one that holds the stored response to which it
	// refers. It stays the only one, whatever serves the model.
	Stored bool

	// Splittable says that one replica may do its prefill and another one its decode.
	Splittable bool
	// PrefilledOn is the replica that has done its prefill, and from which the next one it is sent to reads the KV
	// cache; nil: none has.
	PrefilledOn *backends.Backend

	NoEngine      bool // no engine works on it: it is never queued, and has no load
	NonGenerative bool // its endpoint generates no text: its uncached tokens are not typical

	ContextLengths  backends.ContextLengths // of its model, on Backends
	RefusedLength   int                     // the greatest context length of a replica that has refused it as too long; 0: none has
	Truncates       bool                    // replicas truncate its prompt, so that none refuses it as too long
	MaxOutputTokens int                     // that the output may have; 0: not known

	Turn         prompt.TurnKind
	PromptKey    uint64 // hash of the model and the beginning of the first user message; 0: none
	Conversation uint64 // hash of its session's name; 0: none
	Client       uint64 // hash of the client's address; 0: unknown
	Tenant       uint64 // a queue.TenantID, for fairness; 0: none in particular
	Priority     int    // lower first; above 0: a low-priority request

	// FirstTokenDue is when its first token is due: its arrival and its target for the time to the first token. Zero: it has none.
	FirstTokenDue time.Time
	RefuseLate    bool // it is refused as soon as every candidate is predicted to have its first token later

	QueueTimeouts queue.Timeouts // of all its waits; none: those of the queue's settings
	Waited        queue.Waited   // in the queue, of earlier waits
	Arrival       time.Time      // of the Reservation of an earlier attempt: it keeps its place in the queue; zero: there was none

	// Stalls, if not nil, is called when the chosen backend makes no progress, and again
	// while that lasts, until the Reservation's Commit, RecordFirstEvent or Release.
	Stalls health.StallListener
}

// CountMedia returns how many of the request's MediaItems there are.
func (q *Request) CountMedia() (counts prompt.MediaCounts) {
	if n := len(q.MediaItems); n > 0 {
		counts = q.MediaItems[n-1].Counts
	}
	return counts
}

// CountedSequences returns how many sequences the request counts for: none without an engine.
func (q *Request) CountedSequences() int64 {
	if q.NoEngine {
		return 0
	}
	return int64(min(max(1, q.Sequences), ledger.MaxSequences))
}

// IsStoredLookup reports whether the request asks a backend for what it has in memory. It is
// sent there even if the backend is draining or about to stop.
func (q *Request) IsStoredLookup() bool { return q.Stored && q.NoEngine }

// Class returns the priority class of the request.
func (q *Request) Class() queue.Class { return queue.ClassOf(q.Priority) }

// ConversationKey returns what the turns of its conversation have in common; 0: unknown.
func (q *Request) ConversationKey() uint64 {
	return policy.ConversationKey(q.Conversation, q.PromptKey, q.Turn)
}

// ConversationID returns what identifies its conversation.
func (q *Request) ConversationID() queue.ConversationID {
	return queue.ConversationID{Tenant: q.Tenant, Key: q.ConversationKey()}
}
