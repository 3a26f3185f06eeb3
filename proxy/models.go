package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/proxy/apikey"
)

// models answers GET /v1/models: every card that any replica listed last, as
// that replica wrote it; to the holder of a key, those that it may use.
func (p *Proxy) models(w http.ResponseWriter, _ *http.Request, holder *apikey.Holder) {
	var out bytes.Buffer
	out.WriteString(`{"object":"list","data":[`)
	for i, m := range visible(p.registry.Catalog(), holder) {
		if i > 0 {
			out.WriteByte(',')
		}
		out.Write(m.Card)
	}
	out.WriteString("]}")
	writeJSON(w, out.Bytes())
}

// model answers GET /v1/models/{id}. An id may hold slashes, escaped or not.
func (p *Proxy) model(w http.ResponseWriter, r *http.Request, holder *apikey.Holder) {
	id := strings.TrimPrefix(r.URL.Path, "/v1/models/")
	entry, ok := find(p.registry.Catalog(), id, holder)
	if !ok {
		p.unknownModel(id, holder).write(w, false)
		return
	}
	writeJSON(w, entry.Card)
}

// visible are the models that there are for the holder of a key.
func visible(c *backends.Catalog, holder *apikey.Holder) []backends.Model {
	if holder == nil || holder.Models == nil {
		return c.Models
	}
	return slices.DeleteFunc(slices.Clone(c.Models), func(m backends.Model) bool { return !holder.MayUse(m.ID) })
}

// find looks a model up for the holder of a key.
func find(c *backends.Catalog, id string, holder *apikey.Holder) (backends.Entry, bool) {
	entry, ok := c.Find(id)
	return entry, ok && (holder == nil || holder.MayUse(id))
}

// onlyModel is what a request means that names no model: the only base model
// among those that there are for it.
func (x *exchange) onlyModel(c *backends.Catalog) (string, *apiError) {
	known := visible(c, x.holder)
	only, ok := c.OnlyBase()
	if x.holder != nil && x.holder.Models != nil {
		only, ok = backends.OnlyBase(known)
	}
	switch {
	case ok:
		return only, nil
	case len(known) == 0:
		return "", x.p.unknownModel("", x.holder)
	}
	return "", invalid("model", "no model is named, and several models are served here, or none but adapters: name one of them, see GET /v1/models")
}

// mostNamed is how many models an error names: a fleet can have thousands of adapters.
const mostNamed = 50

func (p *Proxy) unknownModel(id string, holder *apikey.Holder) *apiError {
	catalog := p.registry.Catalog()
	known := visible(catalog, holder)
	if len(catalog.Models) == 0 {
		e := unavailable("no replica has listed its models yet; see the proxy's log for why")
		e.retryAfter = p.unreadyRetryAfter(p.registry.All())
		return e
	}
	if len(id) > 200 {
		id = id[:200] + "…"
	}
	var names []string
	for _, m := range known[:min(len(known), mostNamed)] {
		names = append(names, m.ID)
	}
	if more := len(known) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more, see GET /v1/models", more))
	}
	return &apiError{
		status: http.StatusNotFound, kind: "invalid_request_error", code: "model_not_found", param: "model",
		message: "The model `" + strings.ToValidUTF8(id, "�") + "` does not exist. Models served here: " + strings.Join(names, ", "),
	}
}

func (p *Proxy) versionInfo(w http.ResponseWriter, _ *http.Request, _ *apikey.Holder) {
	out, _ := json.Marshal(map[string]string{"version": p.version})
	writeJSON(w, out)
}

func writeJSON(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Write(body)
}

// live answers whether the process runs.
func (p *Proxy) live(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }
