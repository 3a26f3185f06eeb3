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

// DryRunRequest is a request as a client would send it, of which an operator asks
// where it would go, or tells where somebody else has sent it.
type DryRunRequest struct {
	Endpoint string      // its path; "": /v1/chat/completions
	Header   http.Header // of which only what steers is looked at, and no key ever
	Key      string      // name of the API key that it would come with; "": none
	Tried    []string    // names of the backends that have failed it already
	Body     io.Reader
	Length   int64 // of the body, as claimed; -1: nothing is
}

// DryRunError is why a Question has no answer: mostly what a client would be told.
type DryRunError struct {
	Status  int // HTTP
	Message string
}

func (f *DryRunError) Error() string { return f.Message }

// Explanation is where a request would go, and why.
type Explanation struct {
	Endpoint string `json:"endpoint"`
	Priority int    `json:"priority"`
	router.Explanation
}

// Explain tells where a request would go, by the code that reads requests and
// decides. Nothing is sent, and no key is charged. An error is a *Fault.
func (p *Proxy) Explain(q DryRunRequest) (*Explanation, error) {
	x, fault := p.parseDryRun(q)
	defer x.releaseInput()
	if fault != nil {
		return nil, fault
	}
	tried := make([]*backends.Backend, 0, len(q.Tried))
	for _, name := range q.Tried {
		b, fault := p.findBackend(name)
		if fault != nil {
			return nil, fault
		}
		tried = append(tried, b)
	}
	req := &x.input.request
	return &Explanation{x.endpoint.path, req.Priority, p.router.Explain(*req, tried...)}, nil
}

// Placement is what became of a request that somebody else has sent.
type Placement struct {
	Backend string `json:"backend"`
	Model   string `json:"model"`
	Blocks  int    `json:"blocks"` // full ones of its prompt
	Known   int    `json:"known"`  // of them, that the index has for the backend now
}

// RecordPlacement tells the index that a request was sent to a backend by somebody else. An
// error is a *Fault.
func (p *Proxy) RecordPlacement(q DryRunRequest, backend string) (*Placement, error) {
	x, fault := p.parseDryRun(q)
	defer x.releaseInput()
	if fault != nil {
		return nil, fault
	}
	b, fault := p.findBackend(backend)
	if fault != nil {
		return nil, fault
	}
	req := &x.input.request
	if !slices.Contains(req.Backends, b) {
		return nil, &DryRunError{http.StatusBadRequest, b.Name + " does not list the model " + req.CatalogID}
	}
	return &Placement{b.Name, req.CatalogID, len(req.Blocks), p.router.RecordPlacement(req, b)}, nil
}

// parseDryRun reads a Question as if a client had sent it. What it returns has to be
// freed, whatever the fault.
func (p *Proxy) parseDryRun(q DryRunRequest) (*request, *DryRunError) {
	x := &request{proxy: p, settings: p.settings.Load()}
	if q.Endpoint == "" {
		q.Endpoint = "/v1/chat/completions"
	}
	at := slices.IndexFunc(endpoints, func(e endpoint) bool { return e.path == q.Endpoint && !e.multipart })
	if at < 0 {
		return x, &DryRunError{http.StatusBadRequest, "endpoint has to be one that takes JSON: " + strings.Join(jsonEndpoints(), ", ")}
	}
	x.endpoint = &endpoints[at]
	if q.Key != "" {
		if x.holder = p.keys.Named(q.Key); x.holder == nil {
			return x, &DryRunError{http.StatusNotFound, "no API key has that name; key is the name in the configuration, never the key itself"}
		}
	}
	x.httpReq = &http.Request{Header: x.routingHeaders(q.Header)}
	if fault := x.applyRoutingHints(); fault != nil {
		return x, &DryRunError{fault.status, fault.message}
	}
	var err error
	if x.input.body, err = p.bodies.read(q.Body, q.Length, bodyLimits{x.settings.BodyBytes, x.settings.BodyBytesTotal}); err != nil {
		return x, bodyReadError(err, x.settings.BodyBytes)
	}
	if fault := x.parseInput(); fault != nil {
		return x, &DryRunError{fault.status, fault.message}
	}
	return x, nil
}

// routingHeaders are the headers that routing looks at.
func (r *request) routingHeaders(from http.Header) http.Header {
	h := http.Header{}
	for _, name := range []string{priorityHeader, http.CanonicalHeaderKey(r.settings.SessionHeader)} {
		if values := from[name]; len(values) > 0 && name != "Authorization" && name != "X-Api-Key" { // those would be the operator's
			h[name] = values
		}
	}
	return h
}

func bodyReadError(err error, limit int64) *DryRunError {
	switch {
	case errors.Is(err, errBodyTooLarge):
		return &DryRunError{http.StatusRequestEntityTooLarge, bodyTooLargeMessage(limit)}
	case errors.Is(err, errBodyMemory):
		return &DryRunError{http.StatusServiceUnavailable, "the bodies of the requests under way take all the memory that they may (limits.body_bytes_total)"}
	}
	return &DryRunError{http.StatusBadRequest, "the body ended before its end"}
}

func (p *Proxy) findBackend(name string) (*backends.Backend, *DryRunError) {
	if b := p.registry.Find(name); b != nil {
		return b, nil
	}
	var names []string
	for _, b := range p.registry.All() {
		names = append(names, b.Name)
	}
	return nil, &DryRunError{http.StatusNotFound, "no backend has that name; there are: " + strings.Join(names, ", ")}
}

func jsonEndpoints() (paths []string) {
	for i := range endpoints {
		if !endpoints[i].multipart {
			paths = append(paths, endpoints[i].path)
		}
	}
	return paths
}
