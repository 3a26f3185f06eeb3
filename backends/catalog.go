package backends

// Catalog is the union of all replicas' /v1/models, each as last known when its
// replica is down. Never modified once published, and read without allocation.
type Catalog struct {
	// Models holds one card for every ID: the one of the first backend, in the
	// registry's order, that lists it.
	Models []Model

	entries  map[string]Entry
	onlyBase string
}

// Entry is one model and where it is served.
type Entry struct {
	Model
	Adapter  bool       // a LoRA adapter: its card has a parent
	Backends []*Backend // those that list it, ready or not, by Slot; not to be changed

	anyLength bool // one of them does not say its MaxTokens
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
			if e.MaxTokens = max(e.MaxTokens, m.MaxTokens); m.MaxTokens == 0 || e.anyLength {
				e.MaxTokens, e.anyLength = 0, true
			}
			// A replica that lists an ID twice serves it once.
			if n := len(e.Backends); n == 0 || e.Backends[n-1] != b {
				e.Backends = append(e.Backends, b)
			}
			c.entries[m.ID] = e
		}
	}
	c.onlyBase, _ = OnlyBase(c.Models)
	return c
}

// OnlyBase returns the ID of the only base model among those given, as
// Catalog.OnlyBase does of all.
func OnlyBase(models []Model) (id string, ok bool) {
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

// Find looks a model up by the ID that a client wrote.
func (c *Catalog) Find(id string) (Entry, bool) {
	e, ok := c.entries[id]
	return e, ok
}

// OnlyBase returns the ID of the fleet's only base model, which a request that
// names no model means. IDs with one Root are aliases of one model, and the
// first of them stands for it.
func (c *Catalog) OnlyBase() (string, bool) { return c.onlyBase, c.onlyBase != "" }

// EngineModel returns the model as the engine will see it, for seeding a chain
// of blocks. Aliases of a base model share their KV cache, so they share a seed;
// vLLM hashes an adapter's name into its blocks, so an adapter has its own.
func (c *Catalog) EngineModel(id string) string {
	e, ok := c.entries[id]
	if !ok || e.Adapter || e.Root == "" {
		return id
	}
	return e.Root
}

// MaxTokens is how long a prompt and its answer may be on the replica that takes
// the most; 0 when one of them does not say. A LoRA adapter's is its base model's.
func (c *Catalog) MaxTokens(id string) int {
	e := c.entries[id]
	if e.Adapter {
		e = c.entries[e.Parent]
	}
	return e.MaxTokens
}
