package ledger

import (
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/queue"
)

// Placement is a request that a router has sent to a backend, as far as its peers, the routers of
// other proxies in front of the same replicas, have to know it.
type Placement struct {
	ID      uint64 // unique among those of one router
	Backend *backends.Backend

	Model, Adapter string
	Blocks         []prompt.Block // of the prompt; none if it is too long for the backend
	Forks          []prompt.Fork
	Bytes          int     // of canonical prompt, all sequences included
	PromptTokens   float64 // about
	UncachedTokens float64 // that the backend has to compute, about
	Sequences      int64
	MaxOutput      int // tokens; 0: not known
	Class          queue.Class
	TextClass      prompt.TextClass

	Turn         prompt.TurnKind
	PromptKey    uint64 // of its Request
	Conversation uint64 // likewise
	Tenant       uint64 // likewise

	RequestKind RequestKind

	Retry, Streams, NonGenerative, IsText, TooLong bool

	Prefilled bool // its prefill is over; of a placement in flight that is reported again
}

// PlacementEnd is the end of a Placement, with what routers learn from it.
type PlacementEnd struct {
	Outcome
	TTFT        time.Duration // 0: not measured
	QueuedAhead float64       // uncached tokens sent to the backend before it, and not yet computed
}

// PlacementEventKind is what happened to a Placement.
type PlacementEventKind uint8

// The events of a Placement, in their order. The second one may be missing.
const (
	PlacementSent PlacementEventKind = iota + 1
	PlacementPrefilled
	PlacementEnded
	PlacementIndexed // by IndexPlacement: it has a Backend and Blocks, no ID and no other event
)

// PlacementEvent is a change of a router's account.
type PlacementEvent struct {
	Kind      PlacementEventKind
	Placement // of PlacementSent and PlacementIndexed; of the other events the ID alone
	End       PlacementEnd
	Late      bool // it is read long after it happened: nothing is learned from the time between it and others
}

// PlacementReporter is told what a router sends to its backends. ReportPlacement is called under
// the router's lock: it must not block, nor call the router. It retains nothing of the event.
type PlacementReporter interface {
	ReportPlacement(e *PlacementEvent)
}
