package proxy

import (
	"slices"

	"warmroute/proxy/api"
)

// configureExtraPaths makes paths the extra paths. What backends lack is forgotten if the paths have changed, since
// a number may have been another path's.
func (p *Proxy) configureExtraPaths(paths []string) {
	var before []api.Endpoint
	if t := p.routes.Load(); t != nil {
		before = t.Extra
	}
	after := api.NewExtra(paths, before)
	t := api.NewTable(after)
	p.addLocalRoutes(t)
	p.routes.Store(t)
	if slices.EqualFunc(before, after, func(a, b api.Endpoint) bool { return a.Path == b.Path }) {
		return
	}
	for _, b := range p.registry.All() {
		b.ForgetMissingEndpoints()
	}
	for _, e := range before {
		if !slices.Contains(paths, e.Path) {
			p.metrics.DeleteEndpoint(e.Path)
		}
	}
}
