package proxy

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	"warmroute/backends"
	"warmroute/router"
)

// DryRunRequest is a request that is not sent: an operator asks where it would go, or says where
// another router has sent it.
type DryRunRequest struct {
	Endpoint string      // path; "": /v1/chat/completions
	Header   http.Header // only routing hints are used, never a key
	Key      string      // name of the API key; "": none
	Tried    []string    // names of backends to exclude
	Body     io.Reader
	Length   int64 // of the body; -1: unknown
}

// DryRunError is the error of a DryRunRequest, mostly the one that a client would get.
type DryRunError struct {
	Status  int // HTTP
	Message string
}

func (f *DryRunError) Error() string { return f.Message }

// Explanation says where a request would go, and why.
type Explanation struct {
	Endpoint string `json:"endpoint"`
	Priority int    `json:"priority"`
	Session  string `json:"session,omitempty"` // the header or the body's field that names it; "": none
	router.Explanation
}

// Explain returns where a request would go, by the code that parses and routes requests. Nothing
// is sent, and no key is charged. An error is a *DryRunError.
func (p *Proxy) Explain(q DryRunRequest) (*Explanation, error) {
	x, apiErr := p.parseDryRun(q)
	defer x.releaseInput()
	if apiErr != nil {
		return nil, apiErr
	}
	tried := make([]*backends.Backend, 0, len(q.Tried))
	for _, name := range q.Tried {
		b, apiErr := p.findBackend(name)
		if apiErr != nil {
			return nil, apiErr
		}
		tried = append(tried, b)
	}
	req := &x.input.request
	return &Explanation{x.endpoint.path, req.Priority, x.input.sessionSource, p.router.Explain(*req, tried...)}, nil
}

// Placement is the result of RecordPlacement.
type Placement struct {
	Backend string `json:"backend"`
	Model   string `json:"model"`
	Blocks  int    `json:"blocks"` // full blocks of its prompt
	Known   int    `json:"known"`  // of them, in the index for the backend now
}

// RecordPlacement adds a request that another router has sent to a backend to the index. An error
// is a *DryRunError.
func (p *Proxy) RecordPlacement(q DryRunRequest, backend string) (*Placement, error) {
	x, apiErr := p.parseDryRun(q)
	defer x.releaseInput()
	if apiErr != nil {
		return nil, apiErr
	}
	b, apiErr := p.findBackend(backend)
	if apiErr != nil {
		return nil, apiErr
	}
	req := &x.input.request
	if !slices.Contains(req.Backends, b) {
		return nil, &DryRunError{http.StatusBadRequest, b.Name + " does not list the model " + req.CatalogID}
	}
	return &Placement{b.Name, req.CatalogID, len(req.Blocks), p.router.IndexPlacement(req, b)}, nil
}

// parseDryRun parses a request as if a client had sent it. The caller has to release its input,
// whatever the error.
func (p *Proxy) parseDryRun(q DryRunRequest) (*request, *DryRunError) {
	x := &request{proxy: p, settings: p.settings.Load()}
	if q.Endpoint == "" {
		q.Endpoint = "/v1/chat/completions"
	}
	at := slices.IndexFunc(endpoints, func(e endpoint) bool { return e.path == q.Endpoint && !e.multipart })
	if at < 0 {
		return x, &DryRunError{http.StatusBadRequest, "endpoint must be one with a JSON body: " + strings.Join(jsonEndpoints(), ", ")}
	}
	x.endpoint = &endpoints[at]
	if isEncoded(q.Header) {
		return x, &DryRunError{http.StatusUnsupportedMediaType, contentEncodingMessage}
	}
	if q.Key != "" {
		if x.account = p.keys.FindName(q.Key); x.account == nil {
			return x, &DryRunError{http.StatusNotFound, "unknown API key name; use the name in the configuration, never the key itself"}
		}
	}
	x.httpReq = &http.Request{Header: x.copyRoutingHeaders(q.Header)}
	if apiErr := x.applyRoutingHints(); apiErr != nil {
		return x, &DryRunError{apiErr.status, apiErr.message}
	}
	var err error
	x.input.owner = x.bodyOwner()
	if x.input.body, err = p.bodies.readBody(q.Body, q.Length, x.input.owner, bodyLimits{x.settings.BodyBytes, x.settings.BodyBytesTotal}); err != nil {
		return x, x.dryRunBodyError(err)
	}
	apiErr := x.parseInput()
	if apiErr == nil && x.input.stored.refers() {
		apiErr = x.pinTo(x.findStoredResponse())
	}
	if apiErr != nil {
		return x, &DryRunError{apiErr.status, apiErr.message}
	}
	return x, nil
}

// copyRoutingHeaders returns a header with only the lines that routing uses.
func (r *request) copyRoutingHeaders(from http.Header) http.Header {
	h := http.Header{}
	for _, name := range append([]string{priorityHeader}, r.settings.SessionHeaders...) {
		if values := from[name]; len(values) > 0 && name != "Authorization" && name != "X-Api-Key" { // the operator's own
			h[name] = values
		}
	}
	return h
}

func (r *request) dryRunBodyError(err error) *DryRunError {
	switch {
	case errors.Is(err, errBodyTooLarge):
		return &DryRunError{http.StatusRequestEntityTooLarge, bodyTooLargeMessage(r.settings.BodyBytes)}
	case errors.Is(err, errBodyMemory), errors.Is(err, errBodyShare):
		return &DryRunError{http.StatusServiceUnavailable, bodyMemoryMessage(err, r.input.owner)}
	}
	return &DryRunError{http.StatusBadRequest, "the body is incomplete"}
}

func (p *Proxy) findBackend(name string) (*backends.Backend, *DryRunError) {
	if b := p.registry.Find(name); b != nil {
		return b, nil
	}
	var names []string
	for _, b := range p.registry.All() {
		names = append(names, b.Name)
	}
	return nil, &DryRunError{http.StatusNotFound, "unknown backend; available: " + strings.Join(names, ", ")}
}

func jsonEndpoints() (paths []string) {
	for i := range endpoints {
		if !endpoints[i].multipart {
			paths = append(paths, endpoints[i].path)
		}
	}
	return paths
}
