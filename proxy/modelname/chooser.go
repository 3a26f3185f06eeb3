package modelname

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/zeebo/xxh3"
)

// maxKept bounds the conversations that are kept on another model than their first choice, and the stored responses whose
// models are remembered. An entry takes about 150 bytes.
const maxKept = 1 << 16

// State is the state of a model.
type State int

const (
	Unlisted State = iota // no replica lists it, and none can be started for it
	Unready               // no replica that serves it is ready
	Ready
)

// Reason is why a model was chosen.
type Reason int8

const (
	ReasonNone         Reason = iota // none was chosen
	ReasonOnly                       // it is the only one
	ReasonFirst                      // it is the first
	ReasonFallback                   // it is the first with a ready replica
	ReasonWeight                     // by the weights
	ReasonConversation               // the conversation is on it
	ReasonStored                     // it has made the stored response that the request refers to
)

func (r Reason) String() string {
	return [...]string{
		"", "its only model", "the first of its models", "the first of its models with a ready replica", "by the weights of its models",
		"the model of the conversation", "the model of the stored response",
	}[r]
}

// Request is what a choice depends on.
type Request struct {
	Conversation uint64 // hash of what all requests of a conversation have in common; 0: not known
	IsFirst      bool   // the request begins the conversation
	State        func(model string) State
	Now          time.Time
}

// Choice is one model of a name.
type Choice struct {
	Model  int // its index
	Reason Reason
	// IsAwaited: it has no ready replica, and is chosen since it had one within Settings.FallbackAfter.
	IsAwaited bool
}

// Chooser chooses the models of names. It remembers when models were ready, and which conversations are on another model
// than their first choice. Safe for concurrent use.
type Chooser struct {
	mu      sync.Mutex
	readyAt map[string]time.Time // when a model of a name had a ready replica last; zero: never
	kept    *simplelru.LRU[uint64, string]
}

// NewChooser returns a Chooser that remembers nothing.
func NewChooser() *Chooser {
	kept, err := simplelru.NewLRU[uint64, string](maxKept, nil)
	if err != nil {
		panic(err) // the size is not positive
	}
	return &Chooser{readyAt: map[string]time.Time{}, kept: kept}
}

// Observe records which models of the names have a ready replica at a time, and forgets all others. It is to be called
// every second or so.
func (c *Chooser) Observe(names []*Name, state func(model string) State, now time.Time) {
	readyAt := map[string]time.Time{}
	for _, n := range names {
		for _, model := range n.Models {
			if _, seen := readyAt[model]; seen {
				continue
			}
			if readyAt[model] = (time.Time{}); state(model) == Ready {
				readyAt[model] = now
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for model, at := range readyAt {
		if before, known := c.readyAt[model]; known && before.After(at) {
			readyAt[model] = before
		}
	}
	c.readyAt = readyAt
}

// Choose returns the model of n for a request, and remembers it for the conversation.
func (c *Chooser) Choose(n *Name, r *Request) Choice {
	choice, first := c.peek(n, r)
	if r.Conversation == 0 || len(n.Models) == 1 {
		return choice
	}
	key := keyOf(n, r.Conversation)
	c.mu.Lock()
	defer c.mu.Unlock()
	if choice.Model == first {
		c.kept.Remove(key)
	} else {
		c.kept.Add(key, n.Models[choice.Model])
	}
	return choice
}

// Peek is Choose, but nothing is remembered.
func (c *Chooser) Peek(n *Name, r *Request) Choice {
	choice, _ := c.peek(n, r)
	return choice
}

// peek returns the choice, and the model that would be chosen if all were ready.
func (c *Chooser) peek(n *Name, r *Request) (choice Choice, first int) {
	if len(n.Models) == 1 {
		return Choice{Reason: ReasonOnly}, 0
	}
	states := make([]State, len(n.Models))
	for i, model := range n.Models {
		states[i] = r.State(model) // it may lock, so not below
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	mayChoose := func(i int) bool {
		return states[i] == Ready || r.Now.Sub(c.readyAt[n.Models[i]]) < n.FallbackAfter
	}
	order := n.orderModels(r.Conversation)
	first = order[0]
	choice = Choice{Model: first, Reason: ReasonFirst}
	if n.Weights != nil {
		choice.Reason = ReasonWeight
	}
	if kept, isKept := c.kept.Get(keyOf(n, r.Conversation)); isKept && r.Conversation != 0 && !r.IsFirst {
		if i := slices.Index(n.Models, kept); i >= 0 && mayChoose(i) {
			choice = Choice{Model: i, Reason: ReasonConversation}
			choice.IsAwaited = states[i] != Ready
			return choice, first
		}
	}
	i := slices.IndexFunc(order, mayChoose)
	switch {
	case i > 0:
		choice.Model, choice.Reason = order[i], ReasonFallback
	case i < 0: // no model had a ready replica of late: the request waits for one that may get one
		choice.Model = order[max(slices.IndexFunc(order, func(m int) bool { return states[m] != Unlisted }), 0)]
		return choice, first
	}
	choice.IsAwaited = states[choice.Model] != Ready
	return choice, first
}

// orderModels returns the indexes of the models in the order of preference of a conversation. With weights each conversation has
// its own order, in which a model is before the others with a probability in proportion to its weight, whatever other
// models there are.
func (n *Name) orderModels(conversation uint64) []int {
	order := make([]int, len(n.Models))
	for i := range order {
		order[i] = i
	}
	if n.Weights == nil {
		return order
	}
	var costs [MaxModels]float64
	for i, model := range n.Models {
		uniform := (float64(xxh3.HashStringSeed(model, conversation)>>11) + 0.5) / (1 << 53)
		costs[i] = -math.Log(uniform) / float64(n.Weights[i]) // infinite for a weight of 0
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(costs[a], costs[b]) })
	return order
}

// RememberResponse remembers which model of a name has made a stored response.
func (c *Chooser) RememberResponse(id string, n *Name, model int) {
	if len(n.Models) == 1 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kept.Add(xxh3.HashString(id), n.Models[model])
}

// ModelOfResponse returns the model of a name that has made a stored response, as far as it is remembered.
func (c *Chooser) ModelOfResponse(id string, n *Name) (model int, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept, _ := c.kept.Get(xxh3.HashString(id))
	model = slices.Index(n.Models, kept)
	return model, model >= 0
}

// keyOf returns the key of a conversation that uses a name.
func keyOf(n *Name, conversation uint64) uint64 { return xxh3.HashStringSeed(n.Name, conversation) }
