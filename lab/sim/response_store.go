package sim

import (
	"net/http"
	"strings"
	"sync"

	"github.com/tidwall/gjson"
)

const (
	// vLLM never removes a response. The simulated replica keeps the newest ones.
	maxStoredResponses = 10_000
	maxStoredBytes     = 256 << 20

	responsesPath = "/v1/responses"
	cancelSuffix  = "/cancel"
)

// responseStore keeps complete responses, as vLLM does with
// VLLM_ENABLE_RESPONSES_API_STORE=1. Safe for concurrent use; the zero value is empty.
type responseStore struct {
	mu    sync.Mutex
	byID  map[string]storedResponse
	ids   []string // the oldest first
	bytes int      // of all of them
}

// storedResponse is one response with the conversation up to its end.
type storedResponse struct {
	items  string // JSON, of the conversation, separated by commas
	object []byte
}

func (r *storedResponse) size() int { return len(r.items) + len(r.object) }

func (s *responseStore) add(id string, r storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID = map[string]storedResponse{}
	}
	if old, known := s.byID[id]; known {
		s.bytes -= old.size()
	} else {
		s.ids = append(s.ids, id)
	}
	s.byID[id] = r
	s.bytes += r.size()
	for len(s.ids) > maxStoredResponses || s.bytes > maxStoredBytes {
		oldest := s.byID[s.ids[0]]
		s.bytes -= oldest.size()
		delete(s.byID, s.ids[0])
		s.ids = s.ids[1:]
	}
}

func (s *responseStore) find(id string) (storedResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.byID[id]
	if !ok {
		return r, apiError{status: http.StatusNotFound, kind: "invalid_request_error", message: "Response with id '" + id + "' not found.",
			param: "response_id"}
	}
	return r, nil
}

func (s *responseStore) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID, s.ids, s.bytes = nil, nil, 0
}

// storedRoute returns the handler of a path about one stored response.
func (s *Server) storedRoute(path string) (found route, ok bool) {
	id, ok := strings.CutPrefix(path, responsesPath+"/")
	if !ok {
		return route{}, false
	}
	if id, ok := strings.CutSuffix(id, cancelSuffix); ok && id != "" && !strings.Contains(id, "/") {
		return route{http.MethodPost, false, func(w http.ResponseWriter, _ *http.Request) { s.cancelResponse(w, id) }}, true
	}
	if id == "" || strings.Contains(id, "/") {
		return route{}, false
	}
	return route{http.MethodGet, false, func(w http.ResponseWriter, _ *http.Request) { s.retrieveResponse(w, id) }}, true
}

// retrieveResponse handles GET /v1/responses/{id}. Only background responses can be
// streamed again, and there are none.
func (s *Server) retrieveResponse(w http.ResponseWriter, id string) {
	r, err := s.stored.find(id)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, r.object)
}

// cancelResponse handles POST /v1/responses/{id}/cancel.
func (s *Server) cancelResponse(w http.ResponseWriter, id string) {
	_, err := s.stored.find(id)
	if err == nil {
		err = apiError{status: http.StatusBadRequest, kind: "invalid_request_error", message: "Cannot cancel a synchronous response.",
			param: "response_id"}
	}
	writeError(w, err)
}

// continueStored puts the conversation up to the response that a request continues before
// the request's own input, if it continues one.
func (s *Server) continueStored(in fields) error {
	if !in.has("previous_response_id") {
		return nil
	}
	previous, err := s.stored.find(in["previous_response_id"].String())
	if err != nil {
		return err
	}
	in["input"] = gjson.Parse("[" + joinItems(previous.items, inputItems(in["input"])) + "]")
	return nil
}

// inputItems returns an input, which is a text or a list, as items.
func inputItems(input gjson.Result) string {
	if input.Type == gjson.String {
		return `{"role":"user","content":` + input.Raw + `}`
	}
	return strings.TrimSpace(strings.TrimSuffix(strings.TrimPrefix(input.Raw, "["), "]"))
}

// joinItems joins two lists of items, of which either may be empty.
func joinItems(before, after string) string {
	if before == "" || after == "" {
		return before + after
	}
	return before + "," + after
}
