package admin

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"warmroute/proxy/activity"
)

const (
	defaultFinished = 100 // requests in the response to GET /api/requests
	// maxParameterBytes bounds a value in a query that parseQuery parses.
	maxParameterBytes = 256
)

// FinishedRequests is the response to GET /api/requests.
type FinishedRequests struct {
	Finished uint64            `json:"finished"` // since the start of the proxy
	Oldest   *time.Time        `json:"oldest"`   // end of the oldest that is kept; null: none is
	Found    int               `json:"found"`
	Requests []FinishedRequest `json:"requests"` // of those found, up to the limit, newest first
}

// FinishedRequest is a request that has ended, without its contents and its key.
type FinishedRequest struct {
	Number    uint64    `json:"number"` // counts all of them, from 1
	At        time.Time `json:"at"`     // of its end
	RequestID string    `json:"request_id"`
	TraceID   string    `json:"trace_id,omitempty"`
	Client    string    `json:"client"` // address
	Key       string    `json:"key,omitempty"`
	Endpoint  string    `json:"endpoint"`
	Model     string    `json:"model,omitempty"`
	ModelName string    `json:"model_name,omitempty"` // by which it was asked for, of models.names
	Status    int       `json:"status"`               // 499: client disconnected
	// Disconnected is what the request was doing when its client disconnected.
	Disconnected string `json:"disconnected,omitempty"`
	Cancelled    bool   `json:"cancelled,omitempty"` // by an operator

	// Of the last attempt.
	Backend        string `json:"backend,omitempty"`
	PrefillBackend string `json:"prefill_backend,omitempty"` // that did the prefill; absent: Backend did
	Reason         string `json:"reason,omitempty"`          // of the choice

	Attempts int             `json:"attempts"`
	Failures []failedAttempt `json:"failures"` // the first of them

	PromptTokens    int  `json:"prompt_tokens"`
	PredictedTokens int  `json:"predicted_tokens"` // of them, to be cached
	CachedTokens    *int `json:"cached_tokens"`    // of them, as the replica reported; null: it did not
	OutputTokens    int  `json:"output_tokens"`

	Duration  number  `json:"duration_seconds"`
	QueueTime number  `json:"queue_seconds"`
	TTFT      *number `json:"ttft_seconds"`   // null: not a stream, or no content
	Output    *number `json:"output_seconds"` // from the first token to the end; null: as above
}

type failedAttempt struct {
	Backend string `json:"backend"`
	Reason  string `json:"reason"`
}

func newFinishedRequest(r *activity.FinishedRequest) FinishedRequest {
	f := FinishedRequest{
		Number: r.Number, At: r.At.UTC(), RequestID: r.ID, TraceID: r.TraceID, Client: r.Client, Key: r.Key, Endpoint: r.Endpoint,
		Model: r.Model, ModelName: r.ModelName, Status: r.Code, Disconnected: r.Disconnected, Cancelled: r.Cancelled,
		Backend: r.Backend, PrefillBackend: r.PrefillBackend, Reason: r.Reason, Attempts: r.Attempts, Failures: []failedAttempt{},
		PromptTokens: r.Tokens.Prompt, PredictedTokens: r.Tokens.Predicted, OutputTokens: r.Tokens.Output,
		Duration: seconds(r.Times.Total), QueueTime: seconds(r.Times.Queued),
	}
	for _, a := range r.Failures {
		f.Failures = append(f.Failures, failedAttempt(a))
	}
	if r.Tokens.Cached >= 0 {
		f.CachedTokens = &r.Tokens.Cached
	}
	if r.Times.TTFT > 0 {
		ttft, output := seconds(r.Times.TTFT), seconds(r.Times.Total-r.Times.TTFT)
		f.TTFT, f.Output = &ttft, &output
	}
	return f
}

// findFinishedRequests serves GET /api/requests.
func (h *Handler) findFinishedRequests(w http.ResponseWriter, r *http.Request) {
	filter, limit, err := parseFinishedQuery(r.URL.RawQuery, time.Now())
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	list := h.Proxy.Activity().FindFinished(filter, limit)
	out := FinishedRequests{Finished: list.Finished, Oldest: timeOrNull(list.Oldest), Found: list.Found, Requests: []FinishedRequest{}}
	for _, f := range list.Requests {
		out.Requests = append(out.Requests, newFinishedRequest(f))
	}
	writeJSON(w, http.StatusOK, out)
}

// parseFinishedQuery parses the query of GET /api/requests, sent now. Empty values are as absent ones.
func parseFinishedQuery(query string, now time.Time) (f activity.FinishedFilter, limit int, err error) {
	limit = defaultFinished
	values, err := parseQuery(query, "id", "key", "model", "backend", "status", "slower_than", "since", "until", "limit")
	if err != nil {
		return f, 0, err
	}
	f.ID, f.Key, f.Model, f.Backend = values["id"], values["key"], values["model"], values["backend"]
	if text := values["status"]; text != "" {
		if f.MinStatus, f.MaxStatus, err = parseStatusRange(text); err != nil {
			return f, 0, err
		}
	}
	if text := values["slower_than"]; text != "" {
		if f.SlowerThan, err = time.ParseDuration(text); err != nil || f.SlowerThan < 0 {
			return f, 0, errors.New("slower_than is not a duration such as 500ms or 10s")
		}
	}
	if f.Since, err = parseTimeOrAge("since", values["since"], now); err != nil {
		return f, 0, err
	}
	if f.Until, err = parseTimeOrAge("until", values["until"], now); err != nil {
		return f, 0, err
	}
	if !f.Until.IsZero() && f.Until.Before(f.Since) {
		return f, 0, errors.New("until is before since")
	}
	if text := values["limit"]; text != "" {
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > activity.MaxFinished {
			return f, 0, fmt.Errorf("limit is not an integer from 1 to %d", activity.MaxFinished)
		}
	}
	return f, limit, nil
}

// parseTimeOrAge parses the value of a parameter: a time as in RFC 3339, or how long before now. "" is the zero time.
func parseTimeOrAge(name, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if age, err := time.ParseDuration(text); err == nil && age >= 0 {
		return now.Add(-age), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("%s is neither a time such as 2026-01-31T14:05:00Z nor how long ago, such as 10m", name)
	}
	return at, nil
}

// parseQuery returns the values of a query's parameters, each of which may be given once.
func parseQuery(query string, names ...string) (values map[string]string, err error) {
	known := make(map[string]string, len(names))
	for _, name := range names {
		known[name] = ""
	}
	parsed, err := url.ParseQuery(query)
	if err != nil {
		return nil, errors.New("the query cannot be parsed: encode its values as in a URL")
	}
	for name, list := range parsed {
		if _, ok := known[name]; !ok || len(list) > 1 {
			return nil, fmt.Errorf("the query parameters are %s, each at most once", strings.Join(names, ", "))
		}
		if len(list[0]) > maxParameterBytes {
			return nil, fmt.Errorf("%s is longer than %d bytes", name, maxParameterBytes)
		}
		known[name] = list[0]
	}
	return known, nil
}

// parseStatusRange parses a status such as 503, or a class of them such as 5xx.
func parseStatusRange(text string) (low, high int, err error) {
	class, isClass := strings.CutSuffix(strings.ToLower(text), "xx")
	n, err := strconv.Atoi(class)
	switch {
	case err == nil && isClass && len(class) == 1 && n >= 1 && n <= 5:
		return 100 * n, 100*n + 99, nil
	case err == nil && !isClass && n >= 100 && n <= 599:
		return n, n, nil
	}
	return 0, 0, errors.New("status is neither a status such as 503 nor a class such as 5xx")
}

// historyState has series of points that are Step apart, oldest first. null: unknown.
type historyState struct {
	Model     string    `json:"model,omitempty"`
	Step      number    `json:"step_seconds"`
	End       time.Time `json:"end"` // of the last step
	PerSecond []number  `json:"requests_per_second"`
	TTFT50    []number  `json:"ttft_p50_seconds"`
	TTFT99    []number  `json:"ttft_p99_seconds"`
	HitRatio  []number  `json:"hit_ratio"`
	Queued    []number  `json:"queued"`
}

// serveHistory serves GET /api/history.
func (h *Handler) serveHistory(w http.ResponseWriter, r *http.Request) {
	values, err := parseQuery(r.URL.RawQuery, "model")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	model := values["model"]
	history, isKnown := h.Proxy.Activity().History(model)
	if !isKnown {
		writeError(w, http.StatusNotFound, "no request for that model is known; GET /api/state lists the models")
		return
	}
	writeJSON(w, http.StatusOK, historyState{
		model, seconds(activity.StatsInterval), history.End.UTC(), numbers(history.PerSecond),
		numbers(history.TTFT50), numbers(history.TTFT99), numbers(history.HitRatio), numbers(history.Queued),
	})
}
