package accesslog

import (
	"log/slog"
	"net/http"
	"strings"
	"time"
)

// Entry is what there is to say of one request. What is empty, or 0 where that says
// nothing, is left out of its line.
type Entry struct {
	At        time.Time // its end
	ID        string
	Client    string // address
	Key       string // name of the API key
	Endpoint  string
	Model     string
	Backend   string
	Reason    string // why it went to that backend
	Phase     string // in which the client was lost
	TraceID   string
	Failures  []string // reasons of attempts that failed
	Code      int      // 499: the client left
	Attempts  int
	BytesIn   int64 // of the body
	BytesOut  int64 // of the answer's
	Prompt    int   // tokens
	Predicted int   // of them cached
	Observed  int   // of them cached, by the replica's word; below 0: it gave none
	Answer    int   // tokens
	TTFT      time.Duration
	Duration  time.Duration
	Held      time.Duration
	Overhead  time.Duration
}

func (e *Entry) failed() bool { return e.Code >= http.StatusBadRequest || e.Phase != "" }

// record is the line. Times are in milliseconds, but the overhead.
func (e *Entry) record() slog.Record {
	level := slog.LevelInfo
	if e.Code >= http.StatusInternalServerError {
		level = slog.LevelWarn
	}
	attrs := make([]slog.Attr, 0, 24)
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	number := func(key string, value int) { attrs = append(attrs, slog.Int(key, value)) }
	text("request_id", e.ID)
	text("client", e.Client)
	text("key", e.Key)
	text("endpoint", e.Endpoint)
	text("model", e.Model)
	number("code", e.Code)
	attrs = append(attrs, slog.Float64("duration_ms", milliseconds(e.Duration)), slog.Int64("bytes_in", e.BytesIn), slog.Int64("bytes_out", e.BytesOut))
	if e.Backend != "" {
		text("backend", e.Backend)
		text("reason", e.Reason)
		number("attempts", e.Attempts)
		number("prompt_tokens", e.Prompt)
		number("predicted_tokens", e.Predicted)
		if e.Observed >= 0 {
			number("observed_tokens", e.Observed)
		}
		number("answer_tokens", e.Answer)
		attrs = append(attrs, slog.Int64("overhead_us", e.Overhead.Microseconds()))
	}
	if e.TTFT > 0 {
		attrs = append(attrs, slog.Float64("ttft_ms", milliseconds(e.TTFT)))
	}
	if e.Held > 0 {
		attrs = append(attrs, slog.Float64("queue_ms", milliseconds(e.Held)))
	}
	text("failures", strings.Join(e.Failures, ","))
	text("aborted", e.Phase)
	text("trace_id", e.TraceID)
	r := slog.NewRecord(e.At, level, "request", 0)
	r.AddAttrs(attrs...)
	return r
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
