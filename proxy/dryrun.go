package proxy

import (
	"cmp"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/upstream"
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
	Endpoint     string `json:"endpoint"`
	Priority     int    `json:"priority"`
	Conversation string `json:"conversation,omitempty"` // the header or the body's field that names it; "": none
	ModelName    string `json:"model_name,omitempty"`   // by which the request asks for its model; "": by none of models.names
	ModelReason  string `json:"model_reason,omitempty"` // why the name stands for that model
	router.Explanation
}

// Explain returns where a request would go, by the code that parses and routes requests. Nothing
// is sent, and no key is charged. An error is a *DryRunError.
func (p *Proxy) Explain(q DryRunRequest) (result *Explanation, err error) {
	err = p.dryRun(q, func(r *request) *fault.Error {
		tried := make([]*backends.Backend, 0, len(q.Tried))
		for _, name := range q.Tried {
			b, apiErr := p.findBackend(name)
			if apiErr != nil {
				return apiErr
			}
			tried = append(tried, b)
		}
		req := &r.input.request
		result = &Explanation{
			Endpoint: r.endpoint.Path, Priority: req.Priority, Conversation: r.input.conversationSource, ModelName: r.named.nameOr(""),
			ModelReason: r.named.choice.Reason.String(), Explanation: p.router.Explain(*req, tried...),
		}
		if result.ModelName != "" {
			result.Sentence = r.named.describe(req.CatalogID) + " " + result.Sentence
		}
		return nil
	})
	return result, err
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
func (p *Proxy) RecordPlacement(q DryRunRequest, backend string) (result *Placement, err error) {
	err = p.dryRun(q, func(r *request) *fault.Error {
		b, apiErr := p.findBackend(backend)
		if apiErr != nil {
			return apiErr
		}
		req := &r.input.request
		if !slices.Contains(req.Backends, b) {
			return fault.InvalidRequest("backend", b.Name+" does not list the model "+req.CatalogID)
		}
		result = &Placement{b.Name, req.CatalogID, len(req.Blocks), p.router.IndexPlacement(req, b)}
		return nil
	})
	return result, err
}

// dryRun parses a request as if a client had sent it, and calls use with it.
func (p *Proxy) dryRun(q DryRunRequest, use func(*request) *fault.Error) error {
	r := &request{proxy: p, settings: p.settings.Load(), named: namedModel{isDryRun: true}}
	defer r.releaseInput()
	apiErr := r.parseDryRun(q)
	if apiErr == nil {
		apiErr = use(r)
	}
	if apiErr != nil {
		return &DryRunError{apiErr.Status, apiErr.Message}
	}
	return nil
}

func (r *request) parseDryRun(q DryRunRequest) *fault.Error {
	found, _ := r.proxy.routes.Load().Find(http.MethodPost, cmp.Or(q.Endpoint, "/v1/chat/completions"))
	e := found.Endpoint
	if e == nil || !e.TakesJSON() {
		return fault.InvalidRequest("endpoint", "endpoint must be one with a JSON body: "+strings.Join(r.proxy.jsonEndpoints(), ", "))
	}
	r.endpoint = e
	if httpheader.IsEncoded(q.Header) {
		return contentEncodingError()
	}
	if q.Key != "" {
		if r.account = r.proxy.keys.FindName(q.Key); r.account == nil {
			return fault.New(http.StatusNotFound, "", "unknown API key name; use the name in the configuration, never the key itself")
		}
	}
	r.httpReq = &http.Request{Header: http.Header{}}
	r.inFlight.Arrived = time.Now()
	hints := slices.Concat([]string{upstream.PriorityHeader, upstream.TTFTHeader}, r.settings.UserHeaders, r.settings.ConversationHeaders)
	for _, name := range hints {
		if values := q.Header[name]; len(values) > 0 && name != "Authorization" && name != "X-Api-Key" { // the operator's own
			r.httpReq.Header[name] = values
		}
	}
	r.tenant = r.tenantAt(r.clientAddress)
	if apiErr := r.applyRoutingHints(); apiErr != nil {
		return apiErr
	}
	var err error
	limits := admit.BodyLimits{Each: r.settings.BodyBytes, Total: r.settings.BodyBytesTotal}
	r.input.body, err = r.proxy.bodies.ReadBody(q.Body, q.Length, r.tenant, limits)
	if err != nil {
		return cmp.Or(bodyLimitError(err, r.settings.BodyBytes, r.tenant), fault.InvalidRequest("", "the body is incomplete"))
	}
	if apiErr := r.parseInput(); apiErr != nil {
		return apiErr
	}
	if !r.input.stored.Refers() {
		return nil
	}
	b, result := r.proxy.findStored(&r.input.stored, r.account)
	if apiErr := r.useModelOfStored(b); apiErr != nil {
		return apiErr
	}
	return r.pinTo(b, result)
}

func (p *Proxy) findBackend(name string) (*backends.Backend, *fault.Error) {
	if b := p.registry.Find(name); b != nil {
		return b, nil
	}
	var names []string
	for _, b := range p.registry.All() {
		names = append(names, b.Name)
	}
	return nil, fault.New(http.StatusNotFound, "", "unknown backend; available: "+strings.Join(names, ", "))
}

// jsonEndpoints returns the paths of all endpoints that take JSON.
func (p *Proxy) jsonEndpoints() (paths []string) {
	for _, list := range [][]api.Endpoint{api.Endpoints, p.routes.Load().Extra} {
		for i := range list {
			if list[i].TakesJSON() {
				paths = append(paths, list[i].Path)
			}
		}
	}
	return paths
}
