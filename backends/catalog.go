package backends

// Catalog is the union of all replicas' /v1/models; that of a replica which is down is the last
// known one. Never modified once published, and read without allocation.
type Catalog struct {
	Models []Model // one card for each ID: that of the first backend, by Slot, that lists it

	entries  map[string]Entry
	onlyBase string
}

// Entry is one model and where it is served.
type Entry struct {
	Model
	Adapter  bool       // a LoRA adapter: its card has a parent
	Backends []*Backend // those that list it, ready or not, by Slot; not to be changed

	unbounded bool // one of them does not report its MaxTokens
}

func newCatalog(all []*Backend) *Catalog {
	c := &Catalog{entries: map[string]Entry{}}
	for _, b := range all {
		for _, m := range b.Models() {
			e, known := c.entries[m.ID]
			if !known {
				e = Entry{Model: m, Adapter: m.Parent != ""}
				c.Models = append(c.Models, m)
			}
			if e.MaxTokens = max(e.MaxTokens, m.MaxTokens); m.MaxTokens == 0 || e.unbounded {
				e.MaxTokens, e.unbounded = 0, true
			}
			// A replica may list an ID twice.
			if n := len(e.Backends); n == 0 || e.Backends[n-1] != b {
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

// MaxTokens returns the maximum length of a prompt and its output on the replica that accepts the
// most; 0 when one does not report it. An adapter's is that of its base model.
func (c *Catalog) MaxTokens(id string) int {
	e := c.entries[id]
	if e.Adapter {
		e = c.entries[e.Parent]
	}
	return e.MaxTokens
}
