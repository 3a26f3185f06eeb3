package vllmsim

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// resolve returns the model a request is for. vLLM takes its own for an absent one.
func (s *Server) resolve(name string) (string, error) {
	if name == "" || name == s.cfg.Model {
		return s.cfg.Model, nil
	}
	if slices.Contains(s.cfg.Adapters, name) {
		return name, nil
	}
	return "", unknownModel(name, strings.Join(append([]string{s.cfg.Model}, s.cfg.Adapters...), ", "))
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	b := []byte(`{"object":"list","data":[`)
	b = s.appendCard(b, s.cfg.Model, "")
	for _, adapter := range s.cfg.Adapters {
		b = s.appendCard(append(b, ','), adapter, s.cfg.Model)
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

func (s *Server) appendCard(b []byte, name, parent string) []byte {
	created := strconv.FormatInt(s.start().Unix(), 10)
	b = quote(append(b, `{"id":`...), name)
	b = append(b, `,"object":"model","created":`+created+`,"owned_by":"vllm","root":`...)
	b = quote(b, "/models/"+name)
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
