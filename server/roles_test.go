package server

import (
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/freeport"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// A rolling update of a replica for prefill and one for decode: they pair when both run the same version.
func TestRollingUpdateOfRoles(t *testing.T) {
	t.Parallel()
	replica := func(version, address string) (url string, kill func()) {
		return startSimReplica(t, sim.Config{Version: version, Connector: sim.ConnectorConfig{Enabled: true},
			Engine: engine.Config{KVTokens: 20_000, Speed: 20}}, address)
	}
	g := &guarded{t: t}
	var urls []string
	var kills []func()
	for range 2 {
		url, kill := replica("0.32.0", freeport.FindAddress(t))
		urls, kills = append(urls, url), append(kills, kill)
	}
	g.server, _ = startServer(t, &g.log, func(c *config.Config) { c.Backends[0].Role, c.Backends[1].Role = "prefill", "decode" }, urls...)
	all := g.server.registry.All()
	p, d := all[0], all[1]
	if p.Options().Role != backends.RolePrefill || d.Options().Role != backends.RoleDecode {
		t.Errorf("the roles are %v and %v", p.Options().Role, d.Options().Role)
	}
	g.until("they pair", func() bool { return p.KVForm().PairsWith(d.KVForm()) && p.Version() == "0.32.0" })
	for i, b := range []*backends.Backend{p, d} {
		kills[i]()
		g.until("it is down", func() bool { b.RequestCheck(); return b.State() == backends.Down })
		replica("0.33.0", strings.TrimPrefix(urls[i], "http://"))
		g.until("it is ready, was polled and has said its version", func() bool {
			return b.State() == backends.Ready && b.Load() != nil && b.Version() != ""
		})
		if b.Version() != "0.33.0" {
			t.Errorf("%s is ready with version %q", b.Name, b.Version())
		}
		if i == 0 && p.KVForm().PairsWith(d.KVForm()) {
			t.Error("two versions pair")
		}
	}
	g.until("they pair again", func() bool { return p.KVForm().PairsWith(d.KVForm()) })
}
