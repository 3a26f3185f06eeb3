package backends

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// What is far more than a replica has is no list of models: each of them costs
// memory here, a place in every list of ours and, once asked for, series of metrics.
const (
	maxModels  = 10_000
	maxModelID = 1 << 10
)

// parseModels reads the answer of a replica's /v1/models. encoding/json bounds
// its depth, so an answer made of brackets cannot exhaust the stack.
func parseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	if len(list.Data) > maxModels {
		return nil, fmt.Errorf("lists %d models; more than %d are not taken", len(list.Data), maxModels)
	}
	models := make([]Model, 0, len(list.Data))
	for i, card := range list.Data {
		m, err := parseCard(card)
		if err != nil {
			return nil, fmt.Errorf("card %d: %w", i, err)
		}
		models = append(models, m)
	}
	return models, nil
}

func parseCard(card []byte) (Model, error) {
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
		return Model{}, errors.New("no id")
	}
	if len(known.ID) > maxModelID {
		return Model{}, fmt.Errorf("an id of %d bytes; more than %d are not taken", len(known.ID), maxModelID)
	}
	tokens := 0 // what is no number of tokens is unknown, and no reason to refuse the card
	if json.Unmarshal(card, &length) == nil {
		tokens = labelInt([]byte(length.Tokens))
	}
	// vLLM stamps "created" with the time of the answer and makes up the ids in
	// "permission" each time, so these must not count as a change of the card.
	delete(fields, "created")
	delete(fields, "permission")
	lasting, err := json.Marshal(fields) // keys come out sorted
	if err != nil {
		return Model{}, err
	}
	return Model{ID: known.ID, Root: known.Root, Parent: known.Parent, MaxTokens: tokens, Card: card, lasting: string(lasting)}, nil
}

// sameModels reports whether two lists hold the same cards in the same order.
func sameModels(a, b []Model) bool {
	return slices.EqualFunc(a, b, func(x, y Model) bool { return x.lasting == y.lasting })
}
