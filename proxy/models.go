package proxy

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"

	"warmroute/backends"
)

// models answers GET /v1/models: every card that any replica listed last, as
// that replica wrote it.
func (p *Proxy) models(w http.ResponseWriter, _ *http.Request) {
	var out bytes.Buffer
	out.WriteString(`{"object":"list","data":[`)
	for i, m := range p.registry.Catalog().Models {
		if i > 0 {
			out.WriteByte(',')
		}
		out.Write(m.Card)
	}
	out.WriteString("]}")
	writeJSON(w, out.Bytes())
}

// model answers GET /v1/models/{id}. An id may hold slashes, escaped or not.
func (p *Proxy) model(w http.ResponseWriter, r *http.Request) {
	id := strings.TrimPrefix(r.URL.Path, "/v1/models/")
	entry, ok := p.registry.Catalog().Find(id)
	if !ok {
		p.unknownModel(id).write(w)
		return
	}
	writeJSON(w, entry.Card)
}

func (p *Proxy) unknownModel(id string) *apiError {
	known := p.registry.Catalog().Models
	if len(known) == 0 {
		return unavailable("no replica has listed its models yet; see the proxy's log for why")
	}
	if len(id) > 200 {
		id = id[:200] + "…"
	}
	var names []string
	for _, m := range known {
		names = append(names, m.ID)
	}
	return &apiError{
		status: http.StatusNotFound, kind: "invalid_request_error", code: "model_not_found", param: "model",
		message: "The model `" + strings.ToValidUTF8(id, "�") + "` does not exist. Models served here: " + strings.Join(names, ", "),
	}
}

func (p *Proxy) versionInfo(w http.ResponseWriter, _ *http.Request) {
	out, _ := json.Marshal(map[string]string{"version": p.version})
	writeJSON(w, out)
}

func writeJSON(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Write(body)
}

// live answers whether the process runs.
func (p *Proxy) live(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

// ready answers whether a request would find a replica.
func (p *Proxy) ready(w http.ResponseWriter, _ *http.Request) {
	if p.isLeaving() == refusing {
		shuttingDown().write(w)
		return
	}
	for _, b := range p.registry.All() {
		if b.State() == backends.Ready {
			w.WriteHeader(http.StatusOK)
			return
		}
	}
	unavailable("no replica is ready").write(w)
}
