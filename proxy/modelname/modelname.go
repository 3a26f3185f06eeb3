// Package modelname has the names by which clients ask for models: each stands for one or several models of replicas, and
// for what is changed in the bodies of the requests that use it.
package modelname

import (
	"encoding/json"
	"time"

	"warmroute/prompt"
)

// MaxModels bounds the models of a name.
const MaxModels = 16

// Settings are those of one name.
type Settings struct {
	Name            string
	Models          []string      // at least one and at most MaxModels; without Weights in the order of preference
	Weights         []int         // of Models: their shares of the conversations; nil: the first that may be chosen serves all
	FallbackAfter   time.Duration // for how long a model without a ready replica is chosen before another one
	Set             []prompt.Member
	MaxOutputTokens int // 0: no limit
}

// Name is a name with its settings, which are not modified.
type Name struct {
	Settings
	changes []prompt.Changes // by model
}

// Changes returns what is changed in the body of a request that is for the model of that index.
func (n *Name) Changes(model int) *prompt.Changes { return &n.changes[model] }

// Table finds names. It is not modified after NewTable. A nil Table has none.
type Table struct {
	list   []*Name
	byName map[string]*Name
}

// NewTable returns a table of these names, no two of which are the same.
func NewTable(list []Settings) *Table {
	t := &Table{byName: make(map[string]*Name, len(list))}
	for _, s := range list {
		n := &Name{Settings: s}
		for _, model := range s.Models {
			value, _ := json.Marshal(model) // a string has no error
			n.changes = append(n.changes, prompt.Changes{
				Set: append([]prompt.Member{{Name: "model", Value: string(value)}}, s.Set...), MaxOutputTokens: s.MaxOutputTokens,
			})
		}
		t.list = append(t.list, n)
		t.byName[s.Name] = n
	}
	return t
}

// Find returns the name, or nil if there is none.
func (t *Table) Find(name string) *Name {
	if t == nil || len(t.byName) == 0 {
		return nil
	}
	return t.byName[name]
}

// All returns all names, in the order of the configuration. It must not be changed.
func (t *Table) All() []*Name {
	if t == nil {
		return nil
	}
	return t.list
}
