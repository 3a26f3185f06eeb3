package vllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Each model costs memory, an entry in every list and series of metrics.
const (
	maxModels       = 10_000
	maxModelIDBytes = 1 << 10
)

// Model is one card of a replica's /v1/models.
type Model struct {
	ID     string
	Root   string // what the engine loaded: the same for every alias of a model
	Parent string // the base model's ID when this is a LoRA adapter, else empty
	Card   []byte // the card's JSON as the replica wrote it, every field kept

	MaxTokens int // max_model_len: prompt and output together; 0: not reported

	stable string // the card without what vLLM generates for each response
}

// ParseModels reads the body of a replica's /v1/models. encoding/json bounds its
// depth, so that a body of brackets cannot exhaust the stack.
func ParseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	if len(list.Data) > maxModels {
		return nil, fmt.Errorf("lists %d models, the limit is %d", len(list.Data), maxModels)
	}
	models := make([]Model, 0, len(list.Data))
	for i, card := range list.Data {
		m, err := parseModelCard(card)
		if err != nil {
			return nil, fmt.Errorf("card %d: %w", i, err)
		}
		models = append(models, m)
	}
	return models, nil
}

func parseModelCard(card []byte) (Model, error) {
	var known struct {
		ID     string `json:"id"`
		Root   string `json:"root"`   // null for some engines
		Parent string `json:"parent"` // null for a base model
	}
	var length struct {
		Tokens json.Number `json:"max_model_len"` // null for an adapter
	}
	var fields map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(card, &known), json.Unmarshal(card, &fields)); err != nil {
		return Model{}, err
	}
	if known.ID == "" {
		return Model{}, errors.New("missing id")
	}
	if len(known.ID) > maxModelIDBytes {
		return Model{}, fmt.Errorf("an id of %d bytes, the limit is %d", len(known.ID), maxModelIDBytes)
	}
	tokens := 0 // a value that is not a count is unknown, not an error
	if json.Unmarshal(card, &length) == nil {
		tokens = parsePositiveInt([]byte(length.Tokens))
	}
	// vLLM sets "created" to the time of the response and generates the ids in
	// "permission" each time: these are not changes of the card.
	delete(fields, "created")
	delete(fields, "permission")
	stable, err := json.Marshal(fields) // keys are sorted
	if err != nil {
		return Model{}, err
	}
	return Model{ID: known.ID, Root: known.Root, Parent: known.Parent, MaxTokens: tokens, Card: card, stable: string(stable)}, nil
}

// EqualModels reports whether two lists hold the same cards in the same order.
func EqualModels(a, b []Model) bool {
	return slices.EqualFunc(a, b, func(x, y Model) bool { return x.stable == y.stable })
}

// HaveSameBaseModels reports whether two lists have the same base models. Adapters come and go while a process runs.
func HaveSameBaseModels(a, b []Model) bool { return slices.Equal(baseModels(a), baseModels(b)) }

// baseModels returns the IDs of the base models, sorted.
func baseModels(list []Model) (ids []string) {
	for _, m := range list {
		if m.Parent == "" {
			ids = append(ids, m.ID)
		}
	}
	slices.Sort(ids)
	return ids
}
