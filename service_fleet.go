package main

import (
	"math/rand/v2"
	"time"

	"warmroute/config"
	"warmroute/proxy"
	"warmroute/router"
)

// routerOptions are what the settings come to.
func (s *service) routerOptions(c *config.Config) router.Options {
	return router.Options{
		Backends:       s.registry.All(),
		Catalog:        s.registry.Catalog,
		Policy:         c.Routing.Policy,
		PolicySettings: c.Routing.PolicySettings(),
		Queue:          c.Routing.QueueSettings(),
		Breaker:        router.BreakerSettings(c.Breaker),
		SLO:            c.SLO.TTFT,
		BlockBytes:     c.Index.BlockBytes,
		IndexMaxBytes:  int64(c.Index.MaxBytes),
		PollInterval:   c.Poll.Interval,
		NoLearning:     !c.Routing.Learn,
		Now:            time.Now,
		Rand:           rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}
}

func proxySettings(c *config.Config) proxy.Settings { return c.ProxySettings() }
