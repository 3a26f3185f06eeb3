package backends

// Catalog is the union of all replicas' /v1/models; that of a replica which is down is the last
// known one. Never modified once published, and read without allocation.
type Catalog struct {
	// Models has one card for each ID: that of the first backend, by Slot, of those that list it with the greatest MaxTokens.
	Models []Model

	entries  map[string]Entry
	onlyBase string
}

// Entry is one model and where it is served.
type Entry struct {
	Model
	Adapter  bool       // a LoRA adapter: its card has a parent
	Backends []*Backend // those that list it, ready or not, by Slot; not to be changed

	lengths ContextLengths
	card    int // its index in Models
}

// ContextLengths are how many tokens a prompt and its output may have together on each backend of a model. The zero
// value knows none.
type ContextLengths struct {
	common int   // of all backends; 0: not known, or they differ
	bySlot []int // where they differ; 0: not known
}

// Differ reports whether backends of the model have different lengths.
func (l *ContextLengths) Differ() bool { return l.bySlot != nil }

// Of returns the length on the backend of a slot, which serves the model; 0: not known.
func (l *ContextLengths) Of(slot int) int {
	if slot < len(l.bySlot) {
		return l.bySlot[slot]
	}
	return l.common
}

// set sets the length on the backend of a slot, after those of all backends before it.
func (l *ContextLengths) set(b *Backend, before []*Backend, tokens int) {
	switch {
	case len(before) == 0:
		l.common = tokens
		return
	case l.bySlot == nil && tokens == l.common:
		return
	case l.bySlot == nil:
		for _, other := range before {
			l.setSlot(other.Slot, l.common)
		}
		l.common = 0
	}
	l.setSlot(b.Slot, tokens)
}

func (l *ContextLengths) setSlot(slot, tokens int) {
	for len(l.bySlot) <= slot {
		l.bySlot = append(l.bySlot, 0)
	}
	l.bySlot[slot] = tokens
}

func newCatalog(all []*Backend) *Catalog {
	c := &Catalog{entries: map[string]Entry{}}
	for _, b := range all {
		for _, m := range b.Models() {
			e, known := c.entries[m.ID]
			if !known {
				e = Entry{Model: m, Adapter: m.Parent != "", card: len(c.Models)}
				c.Models = append(c.Models, m)
			} else if m.MaxTokens > e.MaxTokens {
				e.MaxTokens, e.Card = m.MaxTokens, m.Card
				c.Models[e.card].MaxTokens, c.Models[e.card].Card = m.MaxTokens, m.Card
			}
			// A replica may list an ID twice.
			if n := len(e.Backends); n == 0 || e.Backends[n-1] != b {
				e.lengths.set(b, e.Backends, m.MaxTokens)
				e.Backends = append(e.Backends, b)
			}
			c.entries[m.ID] = e
		}
	}
	c.onlyBase, _ = OnlyBaseModel(c.Models)
	return c
}

// OnlyBaseModel returns the ID of the only base model among those given, or false.
// IDs with the same Root are aliases of one model; the first of them is returned.
func OnlyBaseModel(models []Model) (id string, ok bool) {
	first := -1
	for i, m := range models {
		switch {
		case m.Parent != "":
		case first < 0:
			first = i
		case m.Root == "" || m.Root != models[first].Root:
			return "", false
		}
	}
	if first < 0 {
		return "", false
	}
	return models[first].ID, true
}

// Find returns the model with an ID.
func (c *Catalog) Find(id string) (e Entry, ok bool) {
	e, ok = c.entries[id]
	return e, ok
}

// OnlyBaseModel returns the ID of the only base model of all backends, which is that
// of a request without a model, or false.
func (c *Catalog) OnlyBaseModel() (id string, ok bool) { return c.onlyBase, c.onlyBase != "" }

// EngineModel returns the name that seeds a chain of blocks. Aliases of a base
// model share their KV cache and so a seed; vLLM hashes an adapter's name into
// its blocks, so that an adapter has its own.
func (c *Catalog) EngineModel(id string) string {
	e, ok := c.entries[id]
	if !ok || e.Adapter || e.Root == "" {
		return id
	}
	return e.Root
}

// ContextLengths returns the lengths on the backends of a model. Those of an adapter are those of its base model.
func (c *Catalog) ContextLengths(id string) ContextLengths {
	e := c.entries[id]
	if e.Adapter {
		e = c.entries[e.Parent]
	}
	return e.lengths
}
