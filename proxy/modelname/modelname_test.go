package modelname

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// models has the states of models, and the time.
type models struct {
	t       *testing.T
	chooser *Chooser
	name    *Name
	states  map[string]State
	now     time.Time
}

func newModels(t *testing.T, s Settings) *models {
	m := &models{t: t, chooser: NewChooser(), name: NewTable([]Settings{s}).All()[0], states: map[string]State{}, now: time.Unix(1e9, 0)}
	for _, model := range s.Models {
		m.states[model] = Ready
	}
	m.wait(0)
	return m
}

func (m *models) state(model string) State { return m.states[model] }

// wait lets time pass, in which the states are observed.
func (m *models) wait(d time.Duration) {
	for end := m.now.Add(d); ; m.now = m.now.Add(time.Second) {
		m.chooser.Observe([]*Name{m.name}, m.state, m.now)
		if !m.now.Before(end) {
			return
		}
	}
}

func (m *models) want(conversation string, isFirst bool, model string, reason Reason, isAwaited bool) {
	m.t.Helper()
	r := &Request{Conversation: xxh3.HashString(conversation), IsFirst: isFirst, State: m.state, Now: m.now}
	peeked := m.chooser.Peek(m.name, r)
	c := m.chooser.Choose(m.name, r)
	if c != peeked || m.name.Models[c.Model] != model || c.Reason != reason || c.IsAwaited != isAwaited {
		m.t.Errorf("%s: got %s, %+v (peeked %+v); want %s, %v, awaited %v", conversation, m.name.Models[c.Model], c, peeked, model, reason,
			isAwaited)
	}
}

func TestFallback(t *testing.T) {
	m := newModels(t, Settings{Name: "n", Models: []string{"a", "b"}, FallbackAfter: 20 * time.Second})
	m.want("old", true, "a", ReasonFirst, false)
	m.wait(time.Hour)
	m.states["a"] = Unready
	m.want("old", false, "a", ReasonFirst, true)
	m.states["a"] = Unlisted // its replica has left DNS
	m.wait(18 * time.Second)
	m.want("old", false, "a", ReasonFirst, true)
	m.wait(2 * time.Second)
	m.want("old", false, "b", ReasonFallback, false)
	m.want("new", true, "b", ReasonFallback, false)
	m.states["a"] = Ready
	m.wait(time.Minute)
	m.want("old", false, "b", ReasonConversation, false)
	m.want("new", false, "b", ReasonConversation, false)
	m.want("newer", true, "a", ReasonFirst, false)
	m.states["b"] = Unready
	m.want("new", false, "b", ReasonConversation, true)
	m.wait(time.Minute)
	m.want("new", false, "a", ReasonFirst, false)
	m.states["b"] = Ready
	m.want("new", false, "a", ReasonFirst, false)
	m.want("old", true, "a", ReasonFirst, false) // a conversation that begins in the same way
}

func TestFallbackAtOnce(t *testing.T) {
	m := newModels(t, Settings{Name: "n", Models: []string{"a", "b"}})
	m.states["a"] = Unready
	m.want("x", true, "b", ReasonFallback, false)
}

func TestNoModelReady(t *testing.T) {
	m := newModels(t, Settings{Name: "n", Models: []string{"a", "b", "c"}})
	m.states["a"], m.states["b"], m.states["c"] = Unlisted, Unready, Unready
	m.want("x", true, "b", ReasonFirst, false)
	m.states["b"], m.states["c"] = Unlisted, Unlisted
	m.want("x", true, "a", ReasonFirst, false)
}

func TestOnlyModel(t *testing.T) {
	m := newModels(t, Settings{Name: "n", Models: []string{"a"}})
	m.states["a"] = Unlisted
	m.want("x", true, "a", ReasonOnly, false)
}

// Each conversation has its model, in proportion to the weights, and only those move whose model is not ready.
func TestWeights(t *testing.T) {
	const conversations = 20_000
	m := newModels(t, Settings{Name: "n", Models: []string{"a", "b", "c"}, Weights: []int{1, 9, 0}})
	choose := func() (chosen []int, counts [3]int) {
		for i := range conversations {
			r := &Request{Conversation: xxh3.HashString(fmt.Sprint(i)), State: m.state, Now: m.now}
			c := m.chooser.Choose(m.name, r)
			chosen = append(chosen, c.Model)
			counts[c.Model]++
		}
		return chosen, counts
	}
	first, counts := choose()
	if deviation := math.Abs(float64(counts[0]) - conversations/10); deviation > 6*math.Sqrt(conversations*0.1*0.9) || counts[2] > 0 {
		t.Errorf("%v conversations have the models", counts)
	}
	m.states["a"] = Unready
	m.wait(time.Second)
	second, _ := choose()
	m.states["a"] = Ready
	third, _ := choose()
	for i := range conversations {
		if second[i] != 1 || first[i] == 1 && third[i] != 1 {
			t.Fatalf("conversation %d: models %d, %d, %d", i, first[i], second[i], third[i])
		}
		if third[i] != second[i] { // it is on a model that is ready
			t.Fatalf("conversation %d moved back", i)
		}
	}
}

func TestModelOfResponse(t *testing.T) {
	c := NewChooser()
	n := NewTable([]Settings{{Name: "n", Models: []string{"a", "b"}}, {Name: "o", Models: []string{"a", "c"}}}).All()
	c.RememberResponse("resp_1", n[0], 1)
	if model, known := c.ModelOfResponse("resp_1", n[0]); !known || model != 1 {
		t.Errorf("got %d, %v", model, known)
	}
	if model, known := c.ModelOfResponse("resp_1", n[1]); known { // which does not have that model
		t.Errorf("got %d", model)
	}
	if _, known := c.ModelOfResponse("resp_2", n[0]); known {
		t.Error("a response that was not remembered is known")
	}
}

func TestTable(t *testing.T) {
	var none *Table
	if none.Find("a") != nil || none.All() != nil || NewTable(nil).Find("a") != nil {
		t.Error("a table without names has one")
	}
	n := NewTable([]Settings{{Name: "a", Models: []string{`q"`}, MaxOutputTokens: 7}}).Find("a")
	if c := n.Changes(0); c.Set[0].Name != "model" || c.Set[0].Value != `"q\""` || c.MaxOutputTokens != 7 {
		t.Errorf("got %+v", c)
	}
}
