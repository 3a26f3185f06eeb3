package main

import (
	"math/rand/v2"
	"time"

	"warmroute/config"
	"warmroute/proxy"
	"warmroute/router"
)

// routerOptions returns what the router is made of.
func (s *service) routerOptions(c *config.Config) router.Options {
	return router.Options{
		Settings:      routerSettings(c),
		Backends:      s.registry.All(),
		Catalog:       s.registry.Catalog,
		BlockBytes:    c.Index.BlockBytes,
		IndexMaxBytes: int64(c.Index.MaxBytes),
		Now:           time.Now,
		Rand:          rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}
}

func routerSettings(c *config.Config) router.Settings { return c.RouterSettings() }

func proxySettings(c *config.Config) proxy.Settings { return c.ProxySettings() }
