package sim

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// route is what is behind a path. vLLM offers one method for each of those here.
type route struct {
	method    string
	inference bool
	handle    http.HandlerFunc
}

// routes is written out rather than given to a ServeMux, whose redirects,
// cleaned paths and HEAD for every GET a client of vLLM never sees.
func (s *Server) routes() http.Handler {
	table := map[string]route{
		"/v1/chat/completions":      {http.MethodPost, true, s.chatCompletions},
		"/v1/completions":           {http.MethodPost, true, s.completions},
		"/v1/responses":             {http.MethodPost, true, s.responses},
		"/v1/messages":              {http.MethodPost, true, s.messages},
		"/v1/embeddings":            {http.MethodPost, true, s.embeddings},
		"/v1/messages/count_tokens": {http.MethodPost, false, s.countTokens},
		"/v1/models":                {http.MethodGet, false, s.models},
		"/health":                   {http.MethodGet, false, empty},
		"/ping":                     {http.MethodGet, false, empty},
		"/version":                  {http.MethodGet, false, version},
		"/metrics":                  {http.MethodGet, false, s.metrics},
		"/reset_prefix_cache":       {http.MethodPost, false, s.resetPrefixCache},
		"/v1/load_lora_adapter":     {http.MethodPost, false, s.loadAdapter},
		"/v1/unload_lora_adapter":   {http.MethodPost, false, s.unloadAdapter},
		"/tokenize":                 {http.MethodPost, false, s.tokenize},
		"/detokenize":               {http.MethodPost, false, s.detokenize},
		"/is_sleeping":              {http.MethodGet, false, awake},
		"/sim/fault":                {http.MethodPost, false, s.postFault},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", "uvicorn")
		w.Header().Set("Vary", "Origin")
		found, ok := table[r.URL.Path]
		if r.URL.Path != "/sim/fault" && s.misbehave(w, r, found.inference) {
			return
		}
		switch {
		case !s.authorized(r):
			w.Header().Del("Vary") // the check comes before the layer that adds it
			writeJSON(w, http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		case !ok:
			notFound(w, r, table)
		case r.Method != found.method:
			w.Header().Set("Allow", found.method)
			writeJSON(w, http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`)
		default:
			found.handle(w, r)
		}
	})
}

// notFound is FastAPI's answer; a path that only has a slash too many is redirected.
func notFound(w http.ResponseWriter, r *http.Request, table map[string]route) {
	if short := strings.TrimSuffix(r.URL.Path, "/"); short != r.URL.Path {
		if _, ok := table[short]; ok {
			w.Header().Set("Location", "http://"+r.Host+short)
			w.WriteHeader(http.StatusTemporaryRedirect)
			return
		}
	}
	writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
}

// authorized guards what vLLM guards, which is not everything.
func (s *Server) authorized(r *http.Request) bool {
	if s.cfg.APIKey == "" || r.Method == http.MethodOptions {
		return true
	}
	if !strings.HasPrefix(r.URL.Path, "/v1") && !strings.HasPrefix(r.URL.Path, "/v2") {
		return true
	}
	return r.Header.Get("Authorization") == "Bearer "+s.cfg.APIKey
}

// misbehave lets a fault answer a request, if one is in force for it.
func (s *Server) misbehave(w http.ResponseWriter, r *http.Request, inference bool) bool {
	f, ok := s.faults.hit(inference, Hang, Reset, ResetLate, Status)
	if !ok {
		return false
	}
	// Read whole, so that the client can see its request as sent and net/http
	// notices when it leaves.
	_, _ = io.Copy(io.Discard, r.Body)
	switch f.Kind {
	case Hang:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case ResetLate:
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		reset(w)
	case Reset:
		reset(w)
	case Status:
		writeError(w, apiError{status: f.Status, kind: "InternalServerError", message: "simulated " + http.StatusText(f.Status)})
	}
	return true
}

// reset closes the connection so that the client gets ECONNRESET and not EOF.
func reset(w http.ResponseWriter) {
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

func (s *Server) resetPrefixCache(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, `{"success":`+strconv.FormatBool(s.ResetPrefixCache())+`}`)
}

func empty(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

func awake(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, `{"is_sleeping":false}`)
}

func version(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, `{"version":"0.32.0"}`)
}

func writeJSON[T string | []byte](w http.ResponseWriter, status int, body T) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body)) // a client that has left learns nothing either way
}

// quote appends text as a JSON string, escaped no more than vLLM does.
func quote(b []byte, text string) []byte {
	plain := true
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			plain = false
			break
		}
	}
	if plain { // every generated chunk is
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
