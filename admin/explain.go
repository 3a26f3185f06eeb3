package admin

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	"warmroute/proxy"
)

const (
	// mostQuestions is how many requests may be asked or told about at once: each
	// has its body in memory, within the proxy's own bounds.
	mostQuestions = 4
	// mostTried is how many backends a question may say were tried.
	mostTried = 64
)

// takesBody reports whether the body of a POST is a request of a client's, which
// the proxy bounds and not the guard.
func takesBody(path string) bool { return path == "/api/explain" || path == "/api/placed" }

// explain answers POST /api/explain: the body is what a client would send.
func (h *Handler) explain(w http.ResponseWriter, r *http.Request) {
	h.question(w, r, []string{"endpoint", "key", "tried"}, func(q proxy.DryRunRequest) (any, error) { return h.proxy.Explain(q) })
}

// placed answers POST /api/placed: the body is what somebody else has sent to the
// backend that the query names.
func (h *Handler) placed(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("backend")
	if name == "" {
		fail(w, http.StatusBadRequest, "say to which backend the request was sent: POST /api/placed?backend=NAME, with the request's own body")
		return
	}
	h.question(w, r, []string{"endpoint", "key", "backend"}, func(q proxy.DryRunRequest) (any, error) { return h.proxy.RecordPlacement(q, name) })
}

// question makes one of the request, and answers it. A parameter that none of known
// is would be a steering that does not steer.
func (h *Handler) question(w http.ResponseWriter, r *http.Request, known []string, ask func(proxy.DryRunRequest) (any, error)) {
	values := r.URL.Query()
	for name, given := range values {
		if !slices.Contains(known, name) || len(given) > 1 && name != "tried" {
			fail(w, http.StatusBadRequest, "the query takes "+strings.Join(known, ", ")+", each of them once but for tried")
			return
		}
	}
	if len(values["tried"]) > mostTried {
		fail(w, http.StatusBadRequest, "too many backends were tried")
		return
	}
	limited(h.questions, w, r, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, err := ask(proxy.DryRunRequest{
			Endpoint: values.Get("endpoint"), Key: values.Get("key"), Tried: values["tried"],
			Header: r.Header, Body: r.Body, Length: r.ContentLength,
		})
		var fault *proxy.DryRunError
		switch {
		case errors.As(err, &fault):
			fail(w, fault.Status, fault.Message)
		case err != nil:
			fail(w, http.StatusInternalServerError, err.Error())
		default:
			reply(w, http.StatusOK, answer)
		}
	}))
}

// reset answers POST /api/backends/{name}/reset: what is believed of the backend is
// forgotten.
func (h *Handler) reset(w http.ResponseWriter, r *http.Request) {
	b := h.backend(w, r)
	if b == nil {
		return
	}
	was := h.forget(b)
	h.log.Info("backend is reset: nothing is believed of its cache any more", "backend", b.Name, "blocks", was.Blocks, "breaker", was.Breaker.String(), "by", r.RemoteAddr)
	reply(w, http.StatusOK, resetReply{
		Backend: b.Name, State: b.State().String(), Blocks: was.Blocks, Breaker: was.Breaker.String(),
		Learned: learned{was.CacheFactor, was.PrefillRate, was.AnswerTokens, was.BytesPerToken},
	})
}

// resetReply is what a reset has taken away.
type resetReply struct {
	Backend string  `json:"backend"`
	State   string  `json:"state"`
	Blocks  int     `json:"forgotten_blocks"`
	Breaker string  `json:"breaker_was"`
	Learned learned `json:"learned_was"`
}

type learned struct {
	CacheFactor   float64 `json:"capacity_factor"`
	PrefillRate   float64 `json:"prefill_tokens_per_second"`
	AnswerTokens  float64 `json:"answer_tokens"`
	BytesPerToken float64 `json:"bytes_per_token"`
}
