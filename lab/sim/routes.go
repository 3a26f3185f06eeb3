package sim

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// route is the handler of a path, with its only method.
type route struct {
	method    string
	inference bool
	handle    http.HandlerFunc
}

// routes does not use a ServeMux, whose redirects, cleaned paths and HEAD for every
// GET vLLM does not have.
func (s *Server) routes() http.Handler {
	table := map[string]route{
		"/v1/chat/completions":      {http.MethodPost, true, s.chatCompletions},
		"/v1/completions":           {http.MethodPost, true, s.completions},
		"/v1/responses":             {http.MethodPost, true, s.responses},
		"/v1/messages":              {http.MethodPost, true, s.messages},
		"/inference/v1/generate":    {http.MethodPost, true, s.generateTokens},
		"/v1/embeddings":            {http.MethodPost, true, s.embedWithoutEngine},
		"/v1/messages/count_tokens": {http.MethodPost, false, s.countTokens},
		"/v1/models":                {http.MethodGet, false, s.models},
		"/health":                   {http.MethodGet, false, respondOK},
		"/ping":                     {http.MethodGet, false, respondOK},
		"/version":                  {http.MethodGet, false, s.version},
		"/metrics":                  {http.MethodGet, false, s.metrics},
		"/reset_prefix_cache":       {http.MethodPost, false, s.resetPrefixCache},
		"/kv_event_sources":         {http.MethodGet, false, s.kvEventSources},
		"/v1/load_lora_adapter":     {http.MethodPost, false, s.loadAdapter},
		"/v1/unload_lora_adapter":   {http.MethodPost, false, s.unloadAdapter},
		"/tokenize":                 {http.MethodPost, false, s.tokenize},
		"/detokenize":               {http.MethodPost, false, s.detokenize},
		"/is_sleeping":              {http.MethodGet, false, s.getSleeping},
		"/sleep":                    {http.MethodPost, false, s.postSleep},
		"/wake_up":                  {http.MethodPost, false, s.postWakeUp},
		"/is_paused":                {http.MethodGet, false, s.getPaused},
		"/pause":                    {http.MethodPost, false, s.postPause},
		"/resume":                   {http.MethodPost, false, s.postResume},
		"/sim/fault":                {http.MethodPost, false, s.postFault},
	}
	if s.cfg.Connector.Enabled {
		table[sideChannelPath] = route{http.MethodPost, false, s.serveSideChannel}
	}
	for _, path := range s.cfg.Without {
		if path == "/inference/v1/generate" {
			table[path] = route{http.MethodPost, true, respondTokensDisabled}
		} else {
			delete(table, path)
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", "uvicorn")
		if respondToPreflight(w, r) {
			return
		}
		w.Header().Set("Vary", "Origin")
		if r.Header.Get("Origin") != "" {
			w.Header().Set("Access-Control-Allow-Origin", "*")
		}
		found, ok := table[r.URL.Path]
		if !ok && s.cfg.StoreResponses {
			found, ok = s.storedRoute(r.URL.Path)
		}
		if r.URL.Path != "/sim/fault" && s.injectFault(w, r, found.inference) {
			return
		}
		switch {
		case !s.isAuthorized(r):
			w.Header().Del("Vary") // vLLM checks keys before it adds these
			w.Header().Del("Access-Control-Allow-Origin")
			writeJSON(w, http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		case !ok:
			redirectOrNotFound(w, r, table)
		case r.Method != found.method:
			w.Header().Set("Allow", found.method)
			writeJSON(w, http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`)
		default:
			found.handle(w, r)
		}
	})
}

// respondToPreflight responds to a browser that asks whether a page may send a request, as Starlette's
// CORSMiddleware does with vLLM's defaults, and reports whether r was one.
func respondToPreflight(w http.ResponseWriter, r *http.Request) (responded bool) {
	if r.Method != http.MethodOptions || r.Header.Get("Origin") == "" || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h := w.Header()
	h.Set("Vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network")
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY")
	h.Set("Access-Control-Max-Age", "600")
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		h.Set("Access-Control-Allow-Headers", asked)
	}
	h.Set("Content-Type", "text/plain; charset=utf-8")
	io.WriteString(w, "OK")
	return true
}

// redirectOrNotFound responds to an unknown path as FastAPI does: one with a trailing
// slash is redirected.
func redirectOrNotFound(w http.ResponseWriter, r *http.Request, table map[string]route) {
	if short := strings.TrimSuffix(r.URL.Path, "/"); short != r.URL.Path {
		if _, ok := table[short]; ok {
			w.Header().Set("Location", "http://"+r.Host+short)
			w.WriteHeader(http.StatusTemporaryRedirect)
			return
		}
	}
	writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
}

// guardedPaths are the beginnings of the paths on which vLLM requires its API key.
var guardedPaths = [...]string{"/v1", "/v2", "/inference"}

// isAuthorized checks the key on the paths on which vLLM does.
func (s *Server) isAuthorized(r *http.Request) bool {
	if s.cfg.APIKey == "" || r.Method == http.MethodOptions {
		return true
	}
	if !slices.ContainsFunc(guardedPaths[:], func(prefix string) bool { return strings.HasPrefix(r.URL.Path, prefix) }) {
		return true
	}
	return r.Header.Get("Authorization") == "Bearer "+s.cfg.APIKey
}

// injectFault lets an active fault handle a request, and reports whether one did.
func (s *Server) injectFault(w http.ResponseWriter, r *http.Request, inference bool) (handled bool) {
	if inference {
		s.sendSurplusOnFault(r)
	}
	f, ok := s.faults.matchAndCount(inference, Hang, Reset, ResetLate, Status)
	if !ok {
		return false
	}
	// Read the body, so that the client has sent its request and net/http notices
	// when it disconnects.
	_, _ = io.Copy(io.Discard, r.Body)
	switch f.Kind {
	case Hang:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case ResetLate:
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		resetConnection(w)
	case Reset:
		resetConnection(w)
	case Status:
		writeError(w, apiError{status: f.Status, kind: "InternalServerError", message: "simulated " + http.StatusText(f.Status)})
	}
	return true
}

// resetConnection closes the connection so that the client gets ECONNRESET, not EOF.
func resetConnection(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

func (s *Server) postFault(w http.ResponseWriter, r *http.Request) {
	var f Fault
	in := json.NewDecoder(r.Body)
	in.DisallowUnknownFields()
	err := in.Decode(&f)
	if err == nil {
		err = s.SetFault(f)
	}
	if err != nil {
		writeError(w, badRequest("", err.Error()))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) resetPrefixCache(w http.ResponseWriter, r *http.Request) {
	preempt := strings.EqualFold(r.URL.Query().Get("reset_running_requests"), "true")
	writeJSON(w, http.StatusOK, `{"success":`+strconv.FormatBool(s.ResetPrefixCache(preempt))+`}`)
}

func respondOK(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

func (s *Server) version(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, append(appendQuoted([]byte(`{"version":`), s.cfg.Version), '}'))
}

func writeJSON[T string | []byte](w http.ResponseWriter, status int, body T) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body)) // the client may have disconnected
}

// appendQuoted appends text as a JSON string, without escapes that vLLM omits.
func appendQuoted(b []byte, text string) []byte {
	plain := true
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			plain = false
			break
		}
	}
	if plain { // as every generated chunk is
		b = append(b, '"')
		b = append(b, text...)
		return append(b, '"')
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(text); err != nil {
		panic(err) // a string always encodes
	}
	return append(b, bytes.TrimRight(out.Bytes(), "\n")...)
}

// modelOrDefault returns the model of a request, which is vLLM's own if it names none.
func (s *Server) modelOrDefault(name string) (model string, err error) {
	if name == "" || name == s.cfg.Model {
		return s.cfg.Model, nil
	}
	valid := []string{s.cfg.Model}
	for _, a := range s.adapters.loaded() {
		if a.name == name {
			return name, nil
		}
		valid = append(valid, a.name)
	}
	return "", unknownModel(name, strings.Join(valid, ", "))
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	b := []byte(`{"object":"list","data":[`)
	b = s.appendModelCard(b, s.cfg.Model, "/models/"+s.cfg.Model, "")
	for _, a := range s.adapters.loaded() {
		b = s.appendModelCard(append(b, ','), a.name, a.path, s.cfg.Model)
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

func (s *Server) appendModelCard(b []byte, name, root, parent string) []byte {
	created := strconv.FormatInt(s.processStartTime().Unix(), 10)
	b = appendQuoted(append(b, `{"id":`...), name)
	b = append(b, `,"object":"model","created":`+created+`,"owned_by":"vllm","root":`...)
	b = appendQuoted(b, root)
	b = append(b, `,"parent":`...)
	if parent == "" {
		b = append(b, `null,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)...)
	} else {
		b = append(appendQuoted(b, parent), `,"max_model_len":null`...)
	}
	return append(b, `,"permission":[{"id":"modelperm-`+randomID()+`","object":"model_permission","created":`+created+
		`,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,`+
		`"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`...)
}
