package sim

import (
	"net/http"
	"strconv"
	"strings"
)

// resolve returns the model a request is for. vLLM takes its own for an absent one.
func (s *Server) resolve(name string) (string, error) {
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
	b = s.appendCard(b, s.cfg.Model, "/models/"+s.cfg.Model, "")
	for _, a := range s.adapters.loaded() {
		b = s.appendCard(append(b, ','), a.name, a.path, s.cfg.Model)
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

func (s *Server) appendCard(b []byte, name, root, parent string) []byte {
	created := strconv.FormatInt(s.start().Unix(), 10)
	b = quote(append(b, `{"id":`...), name)
	b = append(b, `,"object":"model","created":`+created+`,"owned_by":"vllm","root":`...)
	b = quote(b, root)
	b = append(b, `,"parent":`...)
	if parent == "" {
		b = append(b, `null,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)...)
	} else {
		b = append(quote(b, parent), `,"max_model_len":null`...)
	}
	return append(b, `,"permission":[{"id":"modelperm-`+randomID()+`","object":"model_permission","created":`+created+
		`,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,`+
		`"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`...)
}
