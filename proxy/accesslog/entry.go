package accesslog

import (
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Entry describes one request. Attributes without a value are left out of the line.
type Entry struct {
	At       time.Time // end of the request
	ID       string
	Client   string // address
	Key      string // name of the API key
	Endpoint string
	Model    string
	// ModelName is the name by which the model was asked for, of models.names; "": by none.
	ModelName string
	Backend   string
	// PrefillBackend has done the prefill, if that is another one.
	PrefillBackend string

	Reason string // of the choice of the backend
	// Disconnected is what the request was doing when its client disconnected; empty: it did not.
	Disconnected string
	Cancelled    bool // by an operator
	TraceID      string
	Failures     []Failure // attempts that failed, the first of them
	Code         int       // 499: client disconnected
	Attempts     int
	BytesIn      int64 // of the request's body
	BytesOut     int64 // of the response's body
	Tokens       Tokens
	Times        Times
}

// Failure is an attempt that failed.
type Failure struct {
	Backend string
	Reason  string
}

// Tokens are the numbers of tokens of a request and its response.
type Tokens struct {
	Prompt    int
	Predicted int // cached prompt tokens, as predicted
	Cached    int // cached prompt tokens, as reported by the replica; negative: not reported
	Output    int
}

// Times are the durations of the parts of a request. 0: there was no such part.
type Times struct {
	Total    time.Duration
	TTFT     time.Duration
	Queued   time.Duration // in the admission queue
	Overhead time.Duration // of the proxy
	Prefill  time.Duration // of PrefillBackend's request
}

func (e *Entry) failed() bool {
	return e.Code >= http.StatusBadRequest || e.Disconnected != "" || e.Cancelled
}

// record returns the attributes of the line.
func (e *Entry) record() slog.Record {
	level := slog.LevelInfo
	if e.Code >= http.StatusInternalServerError {
		level = slog.LevelWarn
	}
	attrs := append(make([]slog.Attr, 0, 24),
		slog.String("request_id", e.ID), slog.String("client", e.Client), slog.String("key", e.Key), slog.String("endpoint", e.Endpoint),
		slog.String("model", e.Model), slog.String("model_name", e.ModelName),
		slog.Int("code", e.Code), slog.Float64("duration_ms", milliseconds(e.Times.Total)), slog.Int64("bytes_in", e.BytesIn),
		slog.Int64("bytes_out", e.BytesOut))
	if e.Backend != "" {
		attrs = append(attrs, slog.String("backend", e.Backend), slog.String("reason", e.Reason), slog.Int("attempts", e.Attempts),
			slog.Int("prompt_tokens", e.Tokens.Prompt), slog.Int("predicted_tokens", e.Tokens.Predicted))
		if e.Tokens.Cached >= 0 {
			attrs = append(attrs, slog.Int("cached_tokens", e.Tokens.Cached))
		}
		attrs = append(attrs, slog.Int("output_tokens", e.Tokens.Output), slog.Int64("overhead_us", e.Times.Overhead.Microseconds()))
	}
	if e.PrefillBackend != "" {
		attrs = append(attrs, slog.String("prefill_backend", e.PrefillBackend), slog.Float64("prefill_ms", milliseconds(e.Times.Prefill)))
	}
	if e.Times.TTFT > 0 {
		attrs = append(attrs, slog.Float64("ttft_ms", milliseconds(e.Times.TTFT)))
	}
	if e.Times.Queued > 0 {
		attrs = append(attrs, slog.Float64("queue_ms", milliseconds(e.Times.Queued)))
	}
	reasons := make([]string, len(e.Failures))
	for i, f := range e.Failures {
		reasons[i] = f.Reason
	}
	attrs = append(attrs, slog.String("failures", strings.Join(reasons, ",")), slog.String("disconnected", e.Disconnected))
	if e.Cancelled {
		attrs = append(attrs, slog.Bool("cancelled", true))
	}
	attrs = append(attrs, slog.String("trace_id", e.TraceID))
	r := slog.NewRecord(e.At, level, "request", 0)
	r.AddAttrs(slices.DeleteFunc(attrs, func(a slog.Attr) bool { return a.Value.Kind() == slog.KindString && a.Value.String() == "" })...)
	return r
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
