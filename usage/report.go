package usage

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Query says which rows a Report sums up, and by what.
type Query struct {
	From, To       time.Time // whole hours; zero: no bound
	ByKey, ByModel bool
	ByModelName    bool
}

// ParseQuery returns the Query that the texts stand for. from and to are dates or times as in RFC 3339, by is a list of
// key, model and model_name; all may be empty.
func ParseQuery(from, to, by string) (q Query, err error) {
	if q.From, err = parseTime(from); err != nil {
		return q, fmt.Errorf("from: %w", err)
	}
	if q.To, err = parseTime(to); err != nil {
		return q, fmt.Errorf("to: %w", err)
	}
	if !q.From.IsZero() && !q.To.IsZero() && !q.From.Before(q.To) {
		return q, errors.New("from is not before to")
	}
	q.ByKey, q.ByModel = by == "", by == ""
	for word := range strings.SplitSeq(by, ",") {
		switch strings.TrimSpace(word) {
		case "key":
			q.ByKey = true
		case "model":
			q.ByModel = true
		case "model_name":
			q.ByModelName = true
		case "":
		default:
			return q, fmt.Errorf("by: %q is not key, model, model_name or several of them, such as key,model", word)
		}
	}
	return q, nil
}

func parseTime(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is not a date or time such as 2027-01-31 or 2027-01-31T18:00:00Z", text)
}

// Sum is what a key has used of a model, by a name of models.names. Key, Model or ModelName is nil if rows are not summed up by
// it.
type Sum struct {
	Key       *string `json:"key,omitempty"`
	Model     *string `json:"model,omitempty"`
	ModelName *string `json:"model_name,omitempty"`
	Counts
}

// Report is the answer to a Query.
type Report struct {
	// Since is the beginning of the first hour that is summed up; nil: there is none.
	Since *time.Time `json:"since"`
	Total Counts     `json:"total"`
	Rows  []Sum      `json:"rows"` // those with most tokens first
}

// reportBuilder sums up rows.
type reportBuilder struct {
	query Query
	since time.Time
	total Counts
	sums  rowSet
}

func (b *reportBuilder) add(r *Row) {
	if r.Hour.Before(b.query.From.Truncate(time.Hour)) || !b.query.To.IsZero() && !r.Hour.Before(b.query.To) {
		return
	}
	if b.since.IsZero() || r.Hour.Before(b.since) {
		b.since = r.Hour
	}
	var id rowID
	if b.query.ByKey {
		id.key = r.Key
	}
	if b.query.ByModel {
		id.model = r.Model
	}
	if b.query.ByModelName {
		id.modelName = r.ModelName
	}
	b.total.Add(&r.Counts)
	b.sums.add(id, &r.Counts)
}

func (b *reportBuilder) report() *Report {
	out := &Report{Total: b.total, Rows: []Sum{}}
	if !b.since.IsZero() {
		out.Since = &b.since
	}
	for _, row := range b.sums.rows() {
		s := Sum{Counts: row.Counts}
		if b.query.ByKey {
			s.Key = &row.Key
		}
		if b.query.ByModel {
			s.Model = &row.Model
		}
		if b.query.ByModelName {
			s.ModelName = &row.ModelName
		}
		out.Rows = append(out.Rows, s)
	}
	slices.SortStableFunc(out.Rows, func(a, b Sum) int {
		return int(min(max(b.PromptTokens+b.OutputTokens-a.PromptTokens-a.OutputTokens, -1), 1))
	})
	return out
}

// Sum sums up the rows of usage files. ignored is the number of their lines that are not rows.
func (q Query) Sum(files []io.Reader) (r *Report, ignored int, err error) {
	b := reportBuilder{query: q, sums: rowSet{}}
	for _, file := range files {
		n, err := Read(file, q.From, q.To, b.add)
		if err != nil {
			return nil, 0, err
		}
		ignored += n
	}
	return b.report(), ignored, nil
}

// Report sums up the rows in the file and those in memory. It fails if the file cannot be read.
func (t *Table) Report(q Query) (*Report, error) {
	b := reportBuilder{query: q, sums: rowSet{}}
	in, size, rows, err := t.openRows()
	if err != nil {
		return nil, err
	}
	if in != nil {
		defer in.Close()
		if _, err := Read(io.LimitReader(in, size), q.From, q.To, b.add); err != nil {
			return nil, err
		}
	}
	for i := range rows {
		b.add(&rows[i])
	}
	return b.report(), nil
}

// openRows returns the rows in memory, and the file, of which the first size bytes have the others; nil: there is none.
// The next save does not wait until they are read.
func (t *Table) openRows() (in *os.File, size int64, unsaved []Row, err error) {
	t.saving.Lock() // so that each row is either in the file or in memory
	defer t.saving.Unlock()
	if t.file != nil {
		in, size, err = t.file.open()
	}
	return in, size, t.copyUnsaved(), err
}

// Status says where a Table keeps its rows.
type Status struct {
	HasFile bool
	Started time.Time // from then on rows are counted, if there is no file
	Err     error     // why the last save failed, so that its rows are in memory; nil: it did not fail
}

// Status returns where the rows are.
func (t *Table) Status() Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Status{t.file != nil, t.started, t.saveErr}
}

var csvHeader = []string{
	"key", "model", "requests", "errors", "prompt_tokens", "cached_tokens", "output_tokens",
	"estimated_tokens", "estimated_cached_tokens", "queue_seconds", "saved_prefill_seconds",
}

// HasModelNames reports whether a row is of a name of models.names, by which rows are summed up.
func (r *Report) HasModelNames() bool {
	return slices.ContainsFunc(r.Rows, func(s Sum) bool { return s.ModelName != nil && *s.ModelName != "" })
}

// WriteCSV writes the rows as CSV, with a header. The column of the names of models is there if a row has one.
func (r *Report) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	header, named := csvHeader, r.HasModelNames()
	if named {
		header = slices.Insert(slices.Clone(csvHeader), 2, "model_name")
	}
	_ = out.Write(header) // Error returns its error
	for i := range r.Rows {
		s := &r.Rows[i]
		line := []string{csvText(s.Key), csvText(s.Model)}
		if named {
			line = append(line, csvText(s.ModelName))
		}
		for _, n := range []int64{s.Requests, s.Errors, s.PromptTokens, s.CachedTokens, s.OutputTokens, s.EstimatedTokens,
			s.EstimatedCachedTokens} {
			line = append(line, strconv.FormatInt(n, 10))
		}
		for _, seconds := range []float64{s.QueueSeconds, s.SavedPrefillSeconds} {
			line = append(line, strconv.FormatFloat(seconds, 'f', 3, 64))
		}
		_ = out.Write(line)
	}
	out.Flush()
	return out.Error()
}

// csvText returns a cell with a text; nil: an empty one. Spreadsheets take what begins like a formula for one, so an
// apostrophe precedes that.
func csvText(s *string) string {
	switch {
	case s == nil || *s == "":
		return ""
	case strings.ContainsRune("=+-@\t\r", rune((*s)[0])):
		return "'" + *s
	}
	return *s
}
