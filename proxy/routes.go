package proxy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"warmroute/backends"
	"warmroute/httpapi"
	"warmroute/prompt"
	"warmroute/proxy/apikey"
)

// endpoint is a path whose requests go to replicas. No other path is relayed: a replica also serves some that no client should reach.
type endpoint struct {
	path       string // a pattern
	promptKind prompt.Kind
	format     format
	multipart  bool   // the body is multipart, not JSON
	noEngine   bool   // the replica responds without its engine
	method     string // empty: POST
	isExtra    bool   // of Settings.ExtraPaths

	number backends.Endpoint // by which backends know it; unique
}

// responseIDPart stands in a path for the id of a stored response, which every request is about.
const responseIDPart = "{response_id}"

// isAboutResponse reports whether the requests of an endpoint are about a stored response.
func (e *endpoint) isAboutResponse() bool { return strings.Contains(e.path, responseIDPart) }

// readsRequestID reports whether a replica reads request_id in the body, by which some name their responses.
func (e *endpoint) readsRequestID() bool {
	return !e.multipart && !e.noEngine && !e.isExtra && e.promptKind != prompt.Messages
}

func (e *endpoint) allowedMethod() string { return cmp.Or(e.method, http.MethodPost) }

// format is the format of an endpoint's responses, as far as the relay reads them.
type format int

const (
	plainFormat format = iota // not read
	chatFormat
	completionFormat
	tokensFormat // of /inference/v1/generate
	responsesFormat
	messagesFormat
	storedFormat // a stored response, whose usage was counted when it was made: only its errors are written as in responsesFormat
)

// isRead reports whether the relay reads what a response says.
func (f format) isRead() bool { return f != plainFormat && f != storedFormat }

// hasChoices reports whether a response is a list of choices with a finish_reason, and a stream of them ends with [DONE].
func (f format) hasChoices() bool {
	return f == chatFormat || f == completionFormat || f == tokensFormat
}

// dialect is the API whose clients use an endpoint. Anthropic's read errors of another shape.
type dialect int

const (
	openAI dialect = iota
	anthropic
)

// MissingEndpoints returns the paths of the endpoints that b is known to lack at a time.
func (p *Proxy) MissingEndpoints(b *backends.Backend, now time.Time) (paths []string) {
	for _, list := range [][]endpoint{endpoints, p.routes.Load().extra} {
		for i := range list {
			if b.LacksEndpoint(list[i].number, now) {
				paths = append(paths, list[i].path)
			}
		}
	}
	return paths
}

func (e *endpoint) dialect() dialect { return dialectOf(e.path) }

func dialectOf(path string) dialect {
	if path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/") {
		return anthropic
	}
	return openAI
}

// endpoints are those that every proxy serves.
var endpoints = numberEndpoints(
	endpoint{path: "/v1/chat/completions", promptKind: prompt.Chat, format: chatFormat},
	endpoint{path: "/v1/completions", promptKind: prompt.Completion, format: completionFormat},
	endpoint{path: "/v1/responses", promptKind: prompt.Responses, format: responsesFormat},
	endpoint{path: "/v1/messages", promptKind: prompt.Messages, format: messagesFormat},
	endpoint{path: "/inference/v1/generate", promptKind: prompt.Generate, format: tokensFormat},
	endpoint{path: "/v1/messages/count_tokens", promptKind: prompt.Other, noEngine: true},
	endpoint{path: "/v1/embeddings", promptKind: prompt.Other},
	endpoint{path: "/pooling", promptKind: prompt.Other},
	endpoint{path: "/classify", promptKind: prompt.Other},
	endpoint{path: "/score", promptKind: prompt.Other},
	endpoint{path: "/v1/score", promptKind: prompt.Other},
	endpoint{path: "/rerank", promptKind: prompt.Other},
	endpoint{path: "/v1/rerank", promptKind: prompt.Other},
	endpoint{path: "/v2/rerank", promptKind: prompt.Other},
	endpoint{path: "/tokenize", promptKind: prompt.Other, noEngine: true},
	endpoint{path: "/detokenize", promptKind: prompt.Other, noEngine: true},
	endpoint{path: "/v1/audio/transcriptions", multipart: true, format: plainFormat},
	endpoint{path: "/v1/audio/translations", multipart: true, format: plainFormat},

	// About one stored response, which only the replica that made it has.
	endpoint{path: "/v1/responses/" + responseIDPart, method: http.MethodGet, format: storedFormat, noEngine: true},
	endpoint{path: "/v1/responses/" + responseIDPart + "/cancel", format: storedFormat, noEngine: true},
)

// numberEndpoints numbers the endpoints of a list by their places in it.
func numberEndpoints(list ...endpoint) []endpoint {
	for i := range list {
		list[i].number = backends.Endpoint(i)
	}
	return list
}

// routeTable has the paths of the public listener. Never modified once it is made.
type routeTable struct {
	*httpapi.Mux
	byPattern map[string]route
	extra     []endpoint // of Settings.ExtraPaths
}

// route is what serves the requests of a pattern: replicas, or a handler that needs none.
type route struct {
	endpoint *endpoint // nil: there is none
	local    http.HandlerFunc
}

// newRouteTable returns the table of the endpoints that every proxy serves and of extra ones.
func newRouteTable(extra []endpoint) *routeTable {
	t := &routeTable{Mux: httpapi.NewMux(), byPattern: map[string]route{}, extra: extra}
	for _, list := range [][]endpoint{endpoints, extra} {
		for i := range list {
			t.add(list[i].path, route{endpoint: &list[i]}, list[i].allowedMethod())
		}
	}
	return t
}

// add adds a pattern. The mux only finds it: were it to call the handler, it would copy each request, and stay on the stack of each stream.
func (t *routeTable) add(pattern string, r route, methods ...string) {
	for _, method := range methods {
		t.Method(method, pattern, http.NotFoundHandler())
	}
	t.byPattern[pattern] = r
}

// addLocalRoutes adds the paths that need no replica.
func (p *Proxy) addLocalRoutes(t *routeTable) {
	get := func(pattern string, handler http.HandlerFunc) {
		t.add(pattern, route{local: handler}, http.MethodGet, http.MethodHead)
	}
	get("/v1/models", p.requireKey(p.serveModels))
	get("/v1/models/*", p.requireKey(p.serveModel))
	get("/version", p.requireKey(p.serveVersion))
	get("/livez", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }) // while the process runs
	get("/readyz", p.serveReadyz)
	get("/health", p.serveReadyz)
	t.add("/finish_session", route{local: p.requireKey(serveFinishSession)}, http.MethodPost)
}

// find returns the route of a method and a path, zero if there is none. responseID is what stands for the id of a stored
// response, valid or not.
func (t *routeTable) find(method, path string) (found route, responseID string) {
	pattern, value := t.Lookup(method, path)
	return t.byPattern[pattern], value
}

// findRoute returns the route of a request. Only the plain spelling of an endpoint's path is one: a replica is asked for that, never for
// the client's.
func (t *routeTable) findRoute(r *http.Request) (found route, responseID string) {
	found, responseID = t.find(r.Method, writtenPath(r.URL))
	if found.endpoint != nil && r.URL.RawPath != "" {
		return route{}, ""
	}
	return found, responseID
}

// writtenPath returns a path as it was written: escapes do not match.
func writtenPath(u *url.URL) string { return cmp.Or(u.RawPath, u.Path) }

// trimTrailingSlashes removes the slashes that some clients send at the end of a path.
func trimTrailingSlashes(u *url.URL) {
	if len(u.Path) > 1 && strings.HasSuffix(u.Path, "/") {
		u.Path, u.RawPath = cmp.Or(strings.TrimRight(u.Path, "/"), "/"), strings.TrimRight(u.RawPath, "/")
	}
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
	dialectOf(r.URL.Path).writeError(w, newError(http.StatusUpgradeRequired, codeUpgradeRequired,
		"WebSocket is not served: send the request over HTTP, for instance POST /v1/responses"))
}

// writeError refuses a request without a route: with a 405 where its path has other methods, else with a 404.
func (t *routeTable) writeError(w http.ResponseWriter, r *http.Request) {
	e := t.unknownPathError(r.URL)
	if allowed := t.AllowedMethods(writtenPath(r.URL)); allowed != "" {
		w.Header().Set("Allow", allowed)
		e.status, e.code, e.message = http.StatusMethodNotAllowed, codeMethodNotAllowed, "method not allowed on this path; allowed: "+allowed
	}
	dialectOf(r.URL.Path).writeError(w, e)
}

// maxNamedPathBytes is how much of an unknown path an error names.
const maxNamedPathBytes = 200

// unknownPathError returns the error for a path that is not served. It does not repeat segments that may be an API key.
func (t *routeTable) unknownPathError(u *url.URL) *apiError {
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
	if intended := t.findIntendedPath(u.Path); intended != "" {
		message += ": the API is at " + intended + "; correct the client's base URL"
	} else {
		message += "; the API is at /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/models and other paths of vLLM"
	}
	return newError(http.StatusNotFound, codeNotFound, message)
}

// findIntendedPath returns the served path that a client with a wrong base URL most likely means: its own has /v1 twice or not at
// all, a prefix or doubled slashes. Empty: none.
func (t *routeTable) findIntendedPath(path string) string {
	segments := strings.FieldsFunc(path, func(c rune) bool { return c == '/' })
	path = "/" + strings.Join(segments, "/")
	candidates := []string{path, "/v1" + path, path[max(strings.LastIndex(path, "/v1/"), 0):]}
	for _, candidate := range candidates {
		found, _ := t.find(http.MethodPost, candidate)
		if found.endpoint != nil && !found.endpoint.isAboutResponse() || candidate == "/v1/models" {
			return candidate
		}
	}
	return ""
}

// serveModels serves GET /v1/models: the latest card of every model that a replica lists and the key may use. It is a 503
// while none has listed any.
func (p *Proxy) serveModels(w http.ResponseWriter, _ *http.Request, holder *apikey.Account) {
	if len(p.registry.Catalog().Models) == 0 {
		openAI.writeError(w, p.noModelsError()) // an empty list would tell clients that their model does not exist
		return
	}
	var out bytes.Buffer
	out.WriteString(`{"object":"list","data":[`)
	for i, m := range visibleModels(p.registry.Catalog(), holder) {
		if i > 0 {
			out.WriteByte(',')
		}
		out.Write(m.Card)
	}
	out.WriteString("]}")
	httpapi.WriteJSON(w, http.StatusOK, json.RawMessage(out.Bytes()))
}

// serveModel serves GET /v1/models/{id}. The id may contain slashes, escaped or not.
func (p *Proxy) serveModel(w http.ResponseWriter, r *http.Request, holder *apikey.Account) {
	id := strings.TrimPrefix(r.URL.Path, "/v1/models/")
	entry, ok := findModel(p.registry.Catalog(), id, holder)
	if !ok {
		openAI.writeError(w, p.unknownModelError(id, holder))
		return
	}
	httpapi.WriteJSON(w, http.StatusOK, json.RawMessage(entry.Card))
}

// visibleModels returns the models that the holder of a key may use.
func visibleModels(c *backends.Catalog, holder *apikey.Account) []backends.Model {
	if holder == nil || holder.Models == nil {
		return c.Models
	}
	return slices.DeleteFunc(slices.Clone(c.Models), func(m backends.Model) bool { return !holder.MayUse(m.ID) })
}

func findModel(c *backends.Catalog, id string, holder *apikey.Account) (entry backends.Entry, ok bool) {
	entry, ok = c.Find(id)
	return entry, ok && (holder == nil || holder.MayUse(id))
}

// defaultModel returns the model of a request that names none: the only base model that its key may use.
func (r *request) defaultModel(c *backends.Catalog) (id string, apiErr *apiError) {
	known := visibleModels(c, r.account)
	only, ok := c.OnlyBaseModel()
	if r.account != nil && r.account.Models != nil {
		only, ok = backends.OnlyBaseModel(known)
	}
	switch {
	case ok:
		return only, nil
	case len(known) == 0:
		return "", r.proxy.unknownModelError("", r.account)
	}
	return "", invalidRequestError("model", "model is missing: set it to one of those that GET /v1/models lists")
}

// maxNamedModels is how many models an error lists: there may be thousands of adapters.
const maxNamedModels = 50

func (p *Proxy) unknownModelError(id string, holder *apikey.Account) *apiError {
	catalog := p.registry.Catalog()
	known := visibleModels(catalog, holder)
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
	e := newError(http.StatusNotFound, codeModelNotFound, message)
	e.param = "model"
	return e
}

// noModelsError returns the error where no replica has listed a model.
func (p *Proxy) noModelsError() *apiError {
	all := p.registry.All()
	message := "no replica has listed its models yet; see the proxy's log for why"
	if len(all) == 0 {
		message = "there are no replicas yet: none has an address, or is registered"
	}
	e := unavailableError(codeNoneReady, message)
	e.retryAfter = p.unreadyRetryAfter(all)
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
		openAI.writeError(w, invalidRequestError("session_id", "session_id is missing: send POST /finish_session?session_id=ID"))
		return
	}
	httpapi.WriteJSON(w, http.StatusOK, map[string]string{"status": "ok", "session_id": id})
}
