// Package usage accounts for what API keys and models have used: requests, tokens, time in the admission queue, and
// the prefill time that prefix caches have saved. The account is in memory and, where one is configured, in a file.
package usage

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

// Counts is what requests have used.
type Counts struct {
	Requests     int64 `json:"requests"` // that have ended, those that were refused included
	Errors       int64 `json:"errors"`   // of them; a client disconnect is none
	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"` // of the prompt tokens
	OutputTokens int64 `json:"output_tokens"`
	// What the proxy has estimated because the replica did not report it: prompt and output tokens, and cached tokens.
	EstimatedTokens       int64   `json:"estimated_tokens"`
	EstimatedCachedTokens int64   `json:"estimated_cached_tokens"`
	QueueSeconds          float64 `json:"queue_seconds"`
	SavedPrefillSeconds   float64 `json:"saved_prefill_seconds"` // that the cached tokens would have taken, always an estimate
}

// Add adds o to c.
func (c *Counts) Add(o *Counts) {
	c.Requests += o.Requests
	c.Errors += o.Errors
	c.PromptTokens += o.PromptTokens
	c.CachedTokens += o.CachedTokens
	c.OutputTokens += o.OutputTokens
	c.EstimatedTokens += o.EstimatedTokens
	c.EstimatedCachedTokens += o.EstimatedCachedTokens
	c.QueueSeconds += o.QueueSeconds
	c.SavedPrefillSeconds += o.SavedPrefillSeconds
}

// maxCount bounds what a row in a file may say, so that sums do not overflow.
const maxCount = 1 << 40

// isValid reports whether c may be what requests have used in an hour.
func (c *Counts) isValid() bool {
	for _, n := range [...]int64{c.Requests, c.Errors, c.PromptTokens, c.CachedTokens, c.OutputTokens, c.EstimatedTokens,
		c.EstimatedCachedTokens} {
		if n < 0 || n > maxCount {
			return false
		}
	}
	return c.QueueSeconds >= 0 && c.QueueSeconds <= maxCount && c.SavedPrefillSeconds >= 0 && c.SavedPrefillSeconds <= maxCount
}

// Row is what a key has used of a model in an hour.
type Row struct {
	Hour  time.Time `json:"hour"`  // its beginning, in UTC
	Key   string    `json:"key"`   // "": no keys were configured
	Model string    `json:"model"` // "": the request failed before it was known
	// ModelName is the name by which the model was asked for, of models.names; "": by none.
	ModelName string `json:"model_name,omitempty"`
	Counts
}

// rowID is what Counts are summed up by. A field is zero if they are not summed up by it.
type rowID struct {
	hour       int64 // Unix time
	key, model string
	modelName  string
}

func (r *Row) id() rowID { return rowID{r.Hour.Unix(), r.Key, r.Model, r.ModelName} }

func (id rowID) row(c *Counts) Row {
	return Row{time.Unix(id.hour, 0).UTC(), id.key, id.model, id.modelName, *c}
}

// Other is the key or the model of rows that stand for several, because there were too many.
const Other = "(other)"

// maxRows bounds the rows in memory, to about 6 MB. Beyond it the further models of a key share a row, and beyond
// maxCoarseRows more the further keys share one.
const (
	maxRows       = 20_000
	maxCoarseRows = 4_000
)

// rowSet is a bounded set of rows. At the bound, those of the oldest hour are added to the next one, if there is one.
type rowSet map[rowID]*Counts

// add adds c to the row with that ID.
func (s rowSet) add(id rowID, c *Counts) {
	sum := s[id]
	if sum == nil && len(s) >= maxRows {
		id = s.makeRoom(id)
		sum = s[id]
	}
	if sum == nil {
		sum = new(Counts)
		s[id] = sum
	}
	sum.Add(c)
}

// makeRoom returns the ID of the row to which a row that is not in the full set is added. It merges the oldest hours
// until there is room, unless the key has a row for its other models already.
func (s rowSet) makeRoom(id rowID) rowID {
	ofKey := rowID{hour: id.hour, key: id.key, model: Other}
	if s[ofKey] != nil {
		return ofKey
	}
	for len(s) >= maxRows && s.mergeOldestHour() {
	}
	switch {
	case s[id] != nil || len(s) < maxRows:
		return id
	case s[ofKey] != nil || len(s) < maxRows+maxCoarseRows:
		return ofKey
	}
	return rowID{hour: id.hour, key: Other, model: Other}
}

// mergeOldestHour adds the rows of the oldest hour to those of the next, and reports whether there is a next one.
func (s rowSet) mergeOldestHour() (merged bool) {
	hours := map[int64]bool{}
	for id := range s {
		hours[id.hour] = true
	}
	if len(hours) < 2 {
		return false
	}
	sorted := slices.Sorted(maps.Keys(hours))
	for id, c := range s {
		if id.hour != sorted[0] {
			continue
		}
		delete(s, id)
		id.hour = sorted[1]
		if sum := s[id]; sum != nil {
			sum.Add(c)
		} else {
			s[id] = c
		}
	}
	return true
}

// rows returns the rows by hour, key and model.
func (s rowSet) rows() []Row {
	out := s.unsortedRows()
	slices.SortFunc(out, func(a, b Row) int {
		return cmp.Or(a.Hour.Compare(b.Hour), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Model, b.Model),
			cmp.Compare(a.ModelName, b.ModelName))
	})
	return out
}

// unsortedRows returns the rows in no order, several times faster than rows.
func (s rowSet) unsortedRows() []Row {
	out := make([]Row, 0, len(s))
	for id, c := range s {
		out = append(out, id.row(c))
	}
	return out
}

// Table is the account of a proxy. It is safe for concurrent use.
type Table struct {
	started time.Time
	file    *file // nil: the account is in memory only

	saving   sync.Mutex // held while the file is written; guards unlocked
	unlocked bool       // UnlockFile was called

	mu      sync.Mutex // guards what follows; locked after saving
	unsaved rowSet     // not in the file; without a file all since the start
	byKey   rowSet     // since the start, by key alone
	saveErr error      // of the last save
}

// Record counts a request that ended at that time, and asked for its model by modelName if that is not "". It does not block
// on the file.
func (t *Table) Record(key, model, modelName string, ended time.Time, c *Counts) {
	hour := ended.Truncate(time.Hour).Unix()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unsaved.add(rowID{hour, key, model, modelName}, c)
	t.byKey.add(rowID{key: key}, c)
}

// OfKey returns what a key has used since the start.
func (t *Table) OfKey(key string) Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.byKey[rowID{key: key}]; c != nil {
		return *c
	}
	return Counts{}
}

// takeUnsaved removes and returns the rows that are not in the file.
func (t *Table) takeUnsaved() []Row {
	t.mu.Lock()
	taken := t.unsaved
	t.unsaved = rowSet{}
	t.mu.Unlock()
	return taken.rows() // requests that end do not wait for the sorting
}

// copyUnsaved returns the rows that are not in the file, in no order.
func (t *Table) copyUnsaved() []Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unsaved.unsortedRows()
}

// setSaveResult sets why the rows could not be saved, and counts them as unsaved again; nil: they were saved.
// It returns the result of the save before.
func (t *Table) setSaveResult(rows []Row, err error) (before error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		for i := range rows {
			t.unsaved.add(rows[i].id(), &rows[i].Counts)
		}
	}
	before, t.saveErr = t.saveErr, err
	return before
}
