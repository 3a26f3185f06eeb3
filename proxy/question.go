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

// Question is a request as a client would send it, of which an operator asks
// where it would go, or tells where somebody else has sent it.
type Question struct {
	Endpoint string      // its path; "": /v1/chat/completions
	Header   http.Header // of which only what steers is looked at, and no key ever
	Key      string      // name of the API key that it would come with; "": none
	Tried    []string    // names of the backends that have failed it already
	Body     io.Reader
	Length   int64 // of the body, as claimed; -1: nothing is
}

// Fault is why a Question has no answer: mostly what a client would be told.
type Fault struct {
	Status  int // HTTP
	Message string
}

func (f *Fault) Error() string { return f.Message }

// Explained is where a request would go, and why.
type Explained struct {
	Endpoint string `json:"endpoint"`
	Priority int    `json:"priority"`
	router.Explanation
}

// Explain tells where a request would go, by the code that reads requests and
// decides. Nothing is sent, and no key is charged. An error is a *Fault.
func (p *Proxy) Explain(q Question) (*Explained, error) {
	x, fault := p.consider(q)
	defer x.freeInput()
	if fault != nil {
		return nil, fault
	}
	tried := make([]*backends.Backend, 0, len(q.Tried))
	for _, name := range q.Tried {
		b, fault := p.backend(name)
		if fault != nil {
			return nil, fault
		}
		tried = append(tried, b)
	}
	req := &x.input.request
	return &Explained{x.endpoint.path, req.Priority, p.router.Explain(*req, tried...)}, nil
}

// Placed is what became of a request that somebody else has sent.
type Placed struct {
	Backend string `json:"backend"`
	Model   string `json:"model"`
	Blocks  int    `json:"blocks"` // full ones of its prompt
	Known   int    `json:"known"`  // of them, that the index has for the backend now
}

// Placed tells the index that a request was sent to a backend by somebody else. An
// error is a *Fault.
func (p *Proxy) Placed(q Question, backend string) (*Placed, error) {
	x, fault := p.consider(q)
	defer x.freeInput()
	if fault != nil {
		return nil, fault
	}
	b, fault := p.backend(backend)
	if fault != nil {
		return nil, fault
	}
	req := &x.input.request
	if !slices.Contains(req.Backends, b) {
		return nil, &Fault{http.StatusBadRequest, b.Name + " does not list the model " + req.CatalogID}
	}
	return &Placed{b.Name, req.CatalogID, len(req.Blocks), p.router.RecordPlacement(req, b)}, nil
}

// consider reads a Question as if a client had sent it. What it returns has to be
// freed, whatever the fault.
func (p *Proxy) consider(q Question) (*exchange, *Fault) {
	x := &exchange{p: p, settings: p.settings.Load()}
	if q.Endpoint == "" {
		q.Endpoint = "/v1/chat/completions"
	}
	at := slices.IndexFunc(endpoints, func(e endpoint) bool { return e.path == q.Endpoint && !e.form })
	if at < 0 {
		return x, &Fault{http.StatusBadRequest, "endpoint has to be one that takes JSON: " + strings.Join(jsonEndpoints(), ", ")}
	}
	x.endpoint = &endpoints[at]
	if q.Key != "" {
		if x.holder = p.keys.Named(q.Key); x.holder == nil {
			return x, &Fault{http.StatusNotFound, "no API key has that name; key is the name in the configuration, never the key itself"}
		}
	}
	x.r = &http.Request{Header: x.steering(q.Header)}
	if fault := x.steer(); fault != nil {
		return x, &Fault{fault.status, fault.message}
	}
	var err error
	if x.input.body, err = p.bodies.read(q.Body, q.Length, bodyBounds{x.settings.BodyBytes, x.settings.BodyBytesTotal}); err != nil {
		return x, unreadable(err, x.settings.BodyBytes)
	}
	if fault := x.understand(); fault != nil {
		return x, &Fault{fault.status, fault.message}
	}
	return x, nil
}

// steering are the headers that routing looks at.
func (x *exchange) steering(from http.Header) http.Header {
	h := http.Header{}
	for _, name := range []string{priorityHeader, http.CanonicalHeaderKey(x.settings.SessionHeader)} {
		if values := from[name]; len(values) > 0 && name != "Authorization" && name != "X-Api-Key" { // those would be the operator's
			h[name] = values
		}
	}
	return h
}

func unreadable(err error, limit int64) *Fault {
	switch {
	case errors.Is(err, errBodyTooLarge):
		return &Fault{http.StatusRequestEntityTooLarge, bodyTooLarge(limit)}
	case errors.Is(err, errBodiesTooLarge):
		return &Fault{http.StatusServiceUnavailable, "the bodies of the requests under way take all the memory that they may (limits.body_bytes_total)"}
	}
	return &Fault{http.StatusBadRequest, "the body ended before its end"}
}

func (p *Proxy) backend(name string) (*backends.Backend, *Fault) {
	if b := p.registry.Find(name); b != nil {
		return b, nil
	}
	var names []string
	for _, b := range p.registry.All() {
		names = append(names, b.Name)
	}
	return nil, &Fault{http.StatusNotFound, "no backend has that name; there are: " + strings.Join(names, ", ")}
}

func jsonEndpoints() (paths []string) {
	for i := range endpoints {
		if !endpoints[i].form {
			paths = append(paths, endpoints[i].path)
		}
	}
	return paths
}
