package admin

import (
	"errors"
	"net/http"
	"net/http/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"warmroute/backends"
	"warmroute/fleet"
	"warmroute/proxy"
)

// logOperatorAction logs what an operator has changed. err: why that has failed.
func (h *Handler) logOperatorAction(r *http.Request, action string, err error, attributes ...any) {
	attributes = append([]any{"action", action}, attributes...)
	attributes = append(attributes, "by", r.RemoteAddr)
	if err != nil {
		h.Log.Warn("operator action", append(attributes, "result", "failed", "err", err)...)
		return
	}
	h.Log.Info("operator action", append(attributes, "result", "ok")...)
}

// changeBackend returns the handler that drains the backend in the path, or those of a name's addresses, or ends that, and
// writes their new state. It logs those that change.
func (h *Handler) changeBackend(action string, change func(*backends.Backend)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		wait, ok := waitParameter(w, r)
		if !ok {
			return
		}
		name := pathValue(r, "name")
		list := h.findNamedBackends(w, name)
		if list == nil {
			return
		}
		for _, b := range list {
			before := countDrained(b)
			if change(b); countDrained(b) == before {
				continue
			}
			h.logOperatorAction(r, action, nil, "backend", b.Name, "in_flight", b.InFlight.Load())
		}
		h.cache.invalidate()
		warning := h.waitStored(r.Context())
		if wait > 0 && list[0].Drained() {
			h.waitIdle(r.Context(), list, wait)
		}
		inFlight := int64(0)
		for _, b := range list {
			inFlight += b.CountInFlight()
		}
		writeJSON(w, http.StatusOK, ChangedBackend{Backend: name, State: string(h.condition(list[0]).State), InFlight: inFlight,
			Warning: warning})
	}
}

// countDrained returns how many there are of a backend and its ranks that get no new requests until an operator says so.
func countDrained(b *backends.Backend) (n int) {
	for _, part := range b.WithParts() {
		if part.Drained() {
			n++
		}
	}
	return n
}

func (h *Handler) drain(b *backends.Backend)   { h.Fleet.SetDrained(b, true) }
func (h *Handler) undrain(b *backends.Backend) { h.Fleet.SetDrained(b, false) }

// findBackend returns the backend in the path. If there is none, it writes the error and returns nil.
func (h *Handler) findBackend(w http.ResponseWriter, r *http.Request) *backends.Backend {
	b := h.Registry.Find(pathValue(r, "name"))
	if b == nil {
		h.writeUnknownBackend(w)
	}
	return b
}

// findNamedBackends returns the backend of a name, or those of the addresses of a name that is looked up, without their
// ranks. If there is none, it writes the error and returns nil.
func (h *Handler) findNamedBackends(w http.ResponseWriter, name string) (list []*backends.Backend) {
	named := h.Registry.Find(name)
	if named != nil && !named.Retiring() {
		return []*backends.Backend{named}
	}
	for _, b := range h.Registry.All() {
		server := b.Server()
		if fleet.IsNameOfMember(server.Name, name) && !server.Retiring() && !slices.Contains(list, server) {
			list = append(list, server)
		}
	}
	if list == nil && named != nil {
		return []*backends.Backend{named}
	}
	if list == nil {
		h.writeUnknownBackend(w)
	}
	return list
}

func (h *Handler) writeUnknownBackend(w http.ResponseWriter) {
	var names []string
	for _, b := range h.Registry.All() {
		names = append(names, b.Name)
	}
	writeError(w, http.StatusNotFound, "unknown backend; available: "+strings.Join(names, ", "))
}

type resetReport struct {
	Backend string    `json:"backend"`
	State   string    `json:"state"`
	Blocks  int       `json:"forgotten_blocks"`
	Breaker string    `json:"breaker_was"`
	Learned estimates `json:"learned_was"`
}

type estimates struct {
	CacheFactor   float64 `json:"capacity_factor"`
	PrefillRate   float64 `json:"prefill_tokens_per_second"`
	OutputTokens  float64 `json:"output_tokens"`
	BytesPerToken float64 `json:"bytes_per_token"`
}

func (h *Handler) resetBackend(w http.ResponseWriter, r *http.Request) {
	b := h.findBackend(w, r)
	if b == nil {
		return
	}
	was := h.Reset(b)
	h.logOperatorAction(r, "reset", nil, "backend", b.Name, "blocks", was.Blocks, "breaker", was.Breaker.String())
	writeJSON(w, http.StatusOK, resetReport{
		Backend: b.Name, State: string(h.condition(b).State), Blocks: was.Blocks, Breaker: was.Breaker.String(),
		Learned: estimates{was.Estimates.CapacityFactor, was.Estimates.PrefillRate, was.Estimates.OutputTokens, was.Estimates.BytesPerToken},
	})
}

func (h *Handler) cancelRequest(w http.ResponseWriter, r *http.Request) {
	handle := pathValue(r, "handle")
	if !h.Proxy.Activity().Cancel(handle) {
		writeError(w, http.StatusNotFound, "no request in flight has that handle; GET /api/state lists the handles")
		return
	}
	h.cache.invalidate()
	h.logOperatorAction(r, "cancel", nil, "handle", handle)
	writeJSON(w, http.StatusOK, map[string]any{"cancelled": handle})
}

// explainDecision serves POST /api/explain. The body is a client's request.
func (h *Handler) explainDecision(w http.ResponseWriter, r *http.Request) {
	h.serveDryRun(w, r, []string{"endpoint", "key", "tried"}, func(q proxy.DryRunRequest) (any, error) { return h.Proxy.Explain(q) })
}

// recordSentRequest serves POST /api/sent. The body is a request that another client or proxy has
// sent to the backend in the query.
func (h *Handler) recordSentRequest(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("backend")
	if name == "" {
		writeError(w, http.StatusBadRequest, "missing backend: use POST /api/sent?backend=NAME with the body of the request")
		return
	}
	h.serveDryRun(w, r, []string{"endpoint", "key", "backend"}, func(q proxy.DryRunRequest) (any, error) {
		return h.Proxy.RecordPlacement(q, name)
	})
}

const maxTried = 64

// serveDryRun calls run with the request and writes its result. It rejects query
// parameters that are not in knownParams.
func (h *Handler) serveDryRun(w http.ResponseWriter, r *http.Request, knownParams []string, run func(proxy.DryRunRequest) (any, error)) {
	query := r.URL.Query()
	for name, values := range query {
		if !slices.Contains(knownParams, name) || len(values) > 1 && name != "tried" {
			writeError(w, http.StatusBadRequest, "the query parameters are "+strings.Join(knownParams, ", ")+"; only tried may be repeated")
			return
		}
	}
	if len(query["tried"]) > maxTried {
		writeError(w, http.StatusBadRequest, "too many tried backends")
		return
	}
	result, err := run(proxy.DryRunRequest{
		Endpoint: query.Get("endpoint"), Key: query.Get("key"), Tried: query["tried"],
		Header: r.Header, Body: r.Body, Length: r.ContentLength,
	})
	var invalid *proxy.DryRunError
	switch {
	case errors.As(err, &invalid):
		writeError(w, invalid.Status, invalid.Message)
	case err != nil:
		writeError(w, http.StatusInternalServerError, err.Error())
	default:
		writeJSON(w, http.StatusOK, result)
	}
}

const (
	maxProfileDuration     = 60 * time.Second
	defaultProfileDuration = 30 * time.Second // of package pprof
	profileReadTimeout     = time.Minute
)

func addProfileRoutes(r chi.Router) {
	r = r.With(setProfileTimeout, limitConcurrency(maxProfiles))
	r.Get("/", pprof.Index)
	r.Get("/profile", pprof.Profile)
	r.Get("/trace", pprof.Trace)
	r.Get("/{profile}", func(w http.ResponseWriter, r *http.Request) { pprof.Handler(pathValue(r, "profile")).ServeHTTP(w, r) })
}

// setProfileTimeout bounds how long a profile may take, and lets the response take as long.
func setProfileTimeout(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		duration := defaultProfileDuration
		if value := r.URL.Query().Get("seconds"); value != "" {
			n, err := strconv.Atoi(value)
			if duration = time.Duration(n) * time.Second; err != nil || n < 1 || duration > maxProfileDuration {
				writeError(w, http.StatusBadRequest, "seconds must be an integer from 1 to 60")
				return
			}
		}
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(duration + profileReadTimeout))
		next.ServeHTTP(w, r)
	})
}
