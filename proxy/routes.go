package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"warmroute/backends"
	"warmroute/httpapi"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/router"
)

// MissingEndpoints returns the paths of the endpoints that b is known to lack at a time.
func (p *Proxy) MissingEndpoints(b *backends.Backend, now time.Time) (paths []string) {
	for _, list := range [][]api.Endpoint{api.Endpoints, p.routes.Load().Extra} {
		for i := range list {
			if b.LacksEndpoint(list[i].Number, now) {
				paths = append(paths, list[i].Path)
			}
		}
	}
	return paths
}

// addLocalRoutes adds the paths that need no replica.
func (p *Proxy) addLocalRoutes(t *api.Table) {
	get := func(pattern string, handler http.HandlerFunc) {
		t.Add(pattern, api.Route{Local: handler}, http.MethodGet, http.MethodHead)
	}
	get("/v1/models", p.requireKey(p.serveModels))
	get("/v1/models/*", p.requireKey(p.serveModel))
	get("/version", p.requireKey(p.serveVersion))
	get("/livez", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }) // while the process runs
	get("/readyz", p.serveReadyz)
	get("/health", p.serveReadyz)
	t.Add("/finish_session", api.Route{Local: p.requireKey(serveFinishSession)}, http.MethodPost)
}

// isWebSocketHandshake reports whether the client asks for a WebSocket. An intermediary may have removed Upgrade.
func isWebSocketHandshake(r *http.Request) bool {
	return r.Method == http.MethodGet &&
		(httpguts.HeaderValuesContainsToken(r.Header["Upgrade"], "websocket") || r.Header["Sec-Websocket-Key"] != nil)
}

// writeUpgradeError refuses a WebSocket. Codex tries one first, and takes another status than 426 for an outage.
func writeUpgradeError(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Upgrade", "HTTP/1.1") // RFC 9110 requires both
	h.Set("Connection", "Upgrade")
	fault.Write(w, api.DialectOf(r.URL.Path), fault.New(http.StatusUpgradeRequired, fault.CodeUpgradeRequired,
		"WebSocket is not served: send the request over HTTP, for instance POST /v1/responses"))
}

// writeNoRoute refuses a request without a route: with a 405 where its path has other methods, else with a 404.
func writeNoRoute(w http.ResponseWriter, r *http.Request, t *api.Table) {
	e := unknownPathError(t, r.URL)
	if allowed := t.Mux.AllowedMethods(api.WrittenPath(r.URL)); allowed != "" {
		w.Header().Set("Allow", allowed)
		e.Status, e.Code, e.Message = http.StatusMethodNotAllowed, fault.CodeMethodNotAllowed, "method not allowed on this path; allowed: "+
			allowed
	}
	fault.Write(w, api.DialectOf(r.URL.Path), e)
}

// maxNamedPathBytes is how much of an unknown path an error names.
const maxNamedPathBytes = 200

// unknownPathError returns the error for a path that is not served. It does not repeat segments that may be an API key.
func unknownPathError(t *api.Table, u *url.URL) *fault.Error {
	segments := strings.Split(u.EscapedPath(), "/")
	for i, segment := range segments {
		if len(segment) >= apikey.MinKeyLength {
			segments[i] = "…"
		}
	}
	path := strings.Join(segments, "/")
	if len(path) > maxNamedPathBytes {
		path = strings.ToValidUTF8(path[:maxNamedPathBytes], "") + "…"
	}
	message := "unknown path " + path
	if intended := t.FindIntendedPath(u.Path); intended != "" {
		message += ": the API is at " + intended + "; correct the client's base URL"
	} else {
		message += "; the API is at /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/models and other " +
			"paths of vLLM"
	}
	return fault.New(http.StatusNotFound, fault.CodeNotFound, message)
}

// serveReadyz serves GET /readyz: 200 if a replica is ready, or replicas may be added. With ?model=NAME it needs an API
// key where keys are configured, and
// is 200 only if a replica that lists the model is ready. A model that the key may not use is a 404.
func (p *Proxy) serveReadyz(w http.ResponseWriter, r *http.Request) {
	if p.unready.Load() {
		fault.Write(w, api.OpenAI, fault.ShuttingDown())
		return
	}
	if names, given := r.URL.Query()["model"]; given {
		p.requireKey(func(w http.ResponseWriter, _ *http.Request, holder *apikey.Account) {
			p.serveModelReadyz(w, names, holder)
		})(w, r)
		return
	}
	all := p.registry.All()
	for _, b := range all {
		if b.State() == backends.Ready {
			w.WriteHeader(http.StatusOK)
			return
		}
	}
	if p.settings.Load().ReadyIfEmpty { // an orchestrator would let nobody in who adds one
		io.WriteString(w, "0 replicas\n")
		return
	}
	fault.Write(w, api.OpenAI, p.notReadyError("no replica is ready", all))
}

// serveModelReadyz serves GET /readyz?model=NAME for the holder of a key.
func (p *Proxy) serveModelReadyz(w http.ResponseWriter, names []string, holder *apikey.Account) {
	if len(names) != 1 || names[0] == "" {
		fault.Write(w, api.OpenAI, fault.InvalidRequest("model", "name one model: /readyz?model=NAME"))
		return
	}
	id := names[0]
	catalog := p.registry.Catalog()
	_, ok := p.findModel(catalog, id, holder)
	list := p.backendsOfModel(catalog, id)
	switch {
	case !ok:
		fault.Write(w, api.OpenAI, p.unknownModelError(id, holder))
	case p.router.CountReady(list) == 0:
		fault.Write(w, api.OpenAI, p.notReadyError("no replica that serves this model is ready", list))
	default:
		httpapi.WriteJSON(w, http.StatusOK, map[string]any{"model": id, "ready": true})
	}
}

// notReadyError returns the error where none of the backends is ready.
func (p *Proxy) notReadyError(message string, list []*backends.Backend) *fault.Error {
	e := fault.Unavailable(fault.CodeNoneReady, message)
	e.RetryAfter = p.unreadyRetryAfter(list)
	return e
}

// maxRetryAfter is the longest Retry-After in seconds: OpenAI's SDKs ignore longer ones.
const maxRetryAfter = 60

// unreadyRetryAfter returns the Retry-After for backends of which none is ready: half of the time for which none has been, since
// an outage that has lasted long is likely to last long, and not before the next check.
func (p *Proxy) unreadyRetryAfter(list []*backends.Backend) (seconds int) {
	now := time.Now()
	outage, untilCheck := time.Duration(0), time.Duration(0)
	for i, b := range list {
		down, next := time.Duration(0), b.Status().NextCheck.Sub(now)
		if c := p.router.Status(b); c.State != router.Ready && !c.Since.IsZero() {
			down = now.Sub(c.Since)
		}
		if i == 0 {
			outage, untilCheck = down, next
		}
		outage, untilCheck = min(outage, down), min(untilCheck, next)
	}
	return outageRetryAfter(outage, untilCheck)
}

func outageRetryAfter(outage, untilCheck time.Duration) (seconds int) {
	wait := math.Ceil(max(outage/2, untilCheck, time.Second).Seconds())
	return withJitter(int(min(wait, maxRetryAfter*4/5)))
}

// withJitter adds up to a quarter, so that clients which were refused together do not come back together.
func withJitter(seconds int) int {
	return min(seconds+rand.IntN(seconds/4+1), maxRetryAfter)
}

// serveModels serves GET /v1/models: the latest card of every model that a replica lists and the key may use. It is a 503
// while none has listed any.
func (p *Proxy) serveModels(w http.ResponseWriter, _ *http.Request, holder *apikey.Account) {
	if len(p.registry.Catalog().Models) == 0 {
		fault.Write(w, api.OpenAI, p.noModelsError()) // an empty list would tell clients that their model does not exist
		return
	}
	var out bytes.Buffer
	out.WriteString(`{"object":"list","data":[`)
	for i, m := range p.visibleModels(p.registry.Catalog(), holder) {
		if i > 0 {
			out.WriteByte(',')
		}
		out.Write(p.cardOf(&m))
	}
	out.WriteString("]}")
	httpapi.WriteJSON(w, http.StatusOK, json.RawMessage(out.Bytes()))
}

// serveModel serves GET /v1/models/{id}. The id may contain slashes, escaped or not.
func (p *Proxy) serveModel(w http.ResponseWriter, r *http.Request, holder *apikey.Account) {
	id := strings.TrimPrefix(r.URL.Path, "/v1/models/")
	model, ok := p.findModel(p.registry.Catalog(), id, holder)
	if !ok {
		fault.Write(w, api.OpenAI, p.unknownModelError(id, holder))
		return
	}
	httpapi.WriteJSON(w, http.StatusOK, json.RawMessage(p.cardOf(&model)))
}

// visibleModels returns the models that the holder of a key may use, and the names of models as findNamed does.
func (p *Proxy) visibleModels(c *backends.Catalog, holder *apikey.Account) []backends.Model {
	s := p.settings.Load()
	names := s.names.All()
	if len(names) == 0 && (holder == nil || holder.Models == nil) {
		return c.Models
	}
	list := slices.DeleteFunc(slices.Clone(c.Models), func(m backends.Model) bool {
		return holder != nil && !holder.MayUse(m.ID) || s.names.Find(m.ID) != nil
	})
	for _, n := range names {
		if holder != nil && !holder.MayUse(n.Name) {
			continue
		}
		if model, ok := s.findNamed(c, n); ok {
			list = append(list, model)
		}
	}
	return list
}

// findModel returns the model with an ID, or name, that the holder of a key may use.
func (p *Proxy) findModel(c *backends.Catalog, id string, holder *apikey.Account) (m backends.Model, ok bool) {
	if holder != nil && !holder.MayUse(id) {
		return m, false
	}
	s := p.settings.Load()
	if n := s.names.Find(id); n != nil {
		return s.findNamed(c, n)
	}
	entry, ok := c.Find(id)
	return entry.Model, ok
}

// backendsOfModel returns the backends that serve the model with an ID, or one of the models of a name.
func (p *Proxy) backendsOfModel(c *backends.Catalog, id string) []*backends.Backend {
	s := p.settings.Load()
	if n := s.names.Find(id); n != nil {
		return s.backendsOfNamed(c, n)
	}
	entry, _ := c.Find(id)
	return entry.Backends
}

func (p *Proxy) unknownModelError(id string, holder *apikey.Account) *fault.Error {
	catalog := p.registry.Catalog()
	known := p.visibleModels(catalog, holder)
	if len(catalog.Models) == 0 {
		return p.noModelsError()
	}
	if len(id) > 200 {
		id = id[:200] + "…"
	}
	var names []string
	for _, m := range known[:min(len(known), maxNamedModels)] {
		names = append(names, m.ID)
	}
	if more := len(known) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more, see GET /v1/models", more))
	}
	message := "The model `" + strings.ToValidUTF8(id, "�") + "` does not exist. "
	if len(names) > 0 {
		message += "Available: " + strings.Join(names, ", ")
	} else {
		message += "This API key may use none of the models served here."
	}
	e := fault.New(http.StatusNotFound, fault.CodeModelNotFound, message)
	e.Param = "model"
	return e
}

// maxNamedModels is how many models an error lists: there may be thousands of adapters.
const maxNamedModels = 50

// noModelsError returns the error where no replica has listed a model.
func (p *Proxy) noModelsError() *fault.Error {
	all := p.registry.All()
	message := "no replica has listed its models yet; see the proxy's log for why"
	if len(all) == 0 {
		message = "there are no replicas yet: none has an address, or is registered"
	}
	e := fault.Unavailable(fault.CodeNoneReady, message)
	e.RetryAfter = p.unreadyRetryAfter(all)
	return e
}

func (p *Proxy) serveVersion(w http.ResponseWriter, _ *http.Request, _ *apikey.Account) {
	httpapi.WriteJSON(w, http.StatusOK, map[string]string{"version": p.version})
}

// serveFinishSession serves POST /finish_session?session_id=ID, by which SkyRL reports that a session has ended, as its own
// router does. There is nothing to forget: the proxy keeps no sessions.
func serveFinishSession(w http.ResponseWriter, r *http.Request, _ *apikey.Account) {
	id := r.URL.Query().Get("session_id")
	if id == "" {
		fault.Write(w, api.OpenAI, fault.InvalidRequest("session_id", "session_id is missing: send POST /finish_session?session_id=ID"))
		return
	}
	httpapi.WriteJSON(w, http.StatusOK, map[string]string{"status": "ok", "session_id": id})
}
