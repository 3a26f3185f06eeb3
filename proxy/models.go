package proxy

import (
	"strings"

	"warmroute/backends"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/router"
)

// maxAdapterNameBytes bounds the names that an AdapterPattern matches.
const maxAdapterNameBytes = 256

// AdapterPattern matches the names of LoRA adapters that replicas load at the first request for one.
type AdapterPattern struct {
	Prefix, Suffix string // of the name, with anything in between
	Base           string // the model whose replicas load it
}

func (p *AdapterPattern) matches(name string) bool {
	return len(name) <= maxAdapterNameBytes && len(name) >= len(p.Prefix)+len(p.Suffix) &&
		strings.HasPrefix(name, p.Prefix) && strings.HasSuffix(name, p.Suffix)
}

// findServingModel returns the model whose replicas serve requests for a model: the base model of the first pattern
// that matches, unless the model is listed and no adapter.
func (s *Settings) findServingModel(c *backends.Catalog, model string) string {
	if e, listed := c.Find(model); listed && !e.Adapter {
		return model
	}
	for i := range s.AdapterPatterns {
		if p := &s.AdapterPatterns[i]; p.matches(model) {
			return p.Base
		}
	}
	return model
}

// mayAwaitModel reports whether a request waits although no replica lists the model that serves it: none has listed
// any, or the model can be woken.
func (s *Settings) mayAwaitModel(c *backends.Catalog, model string) bool {
	return len(c.Models) == 0 || s.StartTimeouts[model] > 0
}

// modelQueueTimeouts returns how long the request may wait for a backend, and the name of the setting that limits this
// while none is ready.
func (r *request) modelQueueTimeouts() (t router.QueueTimeouts, noneReadySetting string) {
	t, noneReadySetting = r.settings.QueueTimeouts, "routing.queue.none_ready_timeout"
	if start := r.settings.StartTimeouts[r.input.request.CatalogID]; start > 0 && t != (router.QueueTimeouts{}) {
		t.NoneReady, noneReadySetting = start, "start_hooks[].timeout"
	}
	return r.queueTimeoutsOr(t), noneReadySetting
}

// setModelBackends has the request routed to the backends that serve the model; empty: the default one. It
// returns the engine's name of it, which seeds the hashes of its prompts.
func (r *request) setModelBackends(model string) (engineModel string, apiErr *fault.Error) {
	catalog, req, s := r.proxy.registry.Catalog(), &r.input.request, r.settings
	req.Endpoint = r.endpoint.Number
	req.NonGenerative = r.endpoint.Format == api.PlainFormat
	if model == "" {
		if r.canGoToAnyBackend(catalog) {
			req.Backends = r.proxy.registry.All()
			return "", nil
		}
		if model, apiErr = r.defaultModel(catalog); apiErr != nil {
			return "", apiErr
		}
	}
	if r.account != nil && !r.account.MayUse(model) {
		return "", r.proxy.unknownModelError(model, r.account)
	}
	serving := s.findServingModel(catalog, model)
	own, listed := catalog.Find(model)
	if own.Adapter || serving != model {
		req.Adapter = model
	}
	entry, ok := catalog.Find(serving)
	switch {
	case !ok && s.mayAwaitModel(catalog, serving):
		req.Backends, req.CatalogID, req.Model, req.AwaitsModel = nil, serving, serving, s.StartTimeouts[serving] > 0
		return model, nil
	case !ok:
		return "", r.proxy.unknownModelError(model, r.account)
	}
	r.outcome.Model = entry.ID
	if listed {
		r.outcome.Model = own.ID
	}
	req.Backends, req.CatalogID, req.AwaitsModel = entry.Backends, entry.ID, s.StartTimeouts[entry.ID] > 0
	req.Model = catalog.EngineModel(entry.ID)
	req.ContextLengths = catalog.ContextLengths(entry.ID)
	if serving != model {
		return model, nil
	}
	return req.Model, nil
}

// canGoToAnyBackend reports whether the request, which names no model, may go to any backend: extra paths need none, and
// there is no default one.
func (r *request) canGoToAnyBackend(c *backends.Catalog) bool {
	_, hasDefault := c.OnlyBaseModel()
	return r.endpoint.IsExtra && !hasDefault && len(c.Models) > 0 && (r.account == nil || r.account.Models == nil)
}
