package sim

import (
	"net/http"
	"strconv"
	"strings"
)

// tokenize answers POST /tokenize, for a prompt or for messages.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		_, err = s.resolve(in["model"].Str)
	}
	if err == nil && s.faults.has(Drain) {
		err = errDraining
	}
	if err == nil && !in.has("prompt") && !in.has("messages") {
		err = validation(in.missing("prompt"), in.missing("messages"))
	}
	var text []byte
	if err == nil && in.has("messages") {
		text, err = s.renderChat(in)
	} else if err == nil {
		text = []byte(in["prompt"].String())
	}
	if err != nil {
		writeError(w, err)
		return
	}
	tokens := tokenize(text, nil)
	b := strconv.AppendInt([]byte(`{"count":`), int64(len(tokens)), 10)
	b = append(b, `,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)+`,"tokens":[`...)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t), 10)
	}
	b = append(b, `],"token_strs":`...)
	if !in["return_token_strs"].Bool() {
		writeJSON(w, http.StatusOK, append(b, "null}"...))
		return
	}
	for i, t := range tokens {
		b = quote(append(b, [...]byte{'[', ','}[min(i, 1)]), tokenText(t))
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

// detokenize answers POST /detokenize.
func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil && !in.has("tokens") {
		err = validation(in.missing("tokens"))
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, append(quote([]byte(`{"prompt":`), detokenize(tokenIDs(in["tokens"]))), '}'))
}

func detokenize(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(tokenText(t))
	}
	return b.String()
}
