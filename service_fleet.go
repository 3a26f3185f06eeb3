package main

import (
	"fmt"
	"math/rand/v2"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/proxy"
	"warmroute/router"
	"warmroute/router/policy"
)

// openFleet makes the backends and what carries requests to them.
func (s *service) openFleet() error {
	c := s.config
	var list []*backends.Backend
	for _, b := range c.Backends {
		u, err := backends.ParseURL(b.URL)
		if err != nil {
			return fmt.Errorf("backend %s: %w", b.Name, err)
		}
		secured, err := b.tlsConfig()
		if err != nil {
			return fmt.Errorf("backend %s: certificate: %w", b.Name, err)
		}
		t := transport.New(transport.Options{
			URL:            u,
			TLS:            secured,
			ConnectTimeout: c.Timeouts.Connect,
			IdleTimeout:    c.Timeouts.KeepaliveIdle,
			MaxConns:       c.Connections.MaxPerBackend,
		})
		probe := transport.New(transport.Options{URL: u, TLS: secured, ConnectTimeout: c.Timeouts.Connect, IdleTimeout: c.Timeouts.KeepaliveIdle})
		s.transports = append(s.transports, t, probe)
		backend := backends.New(b.Name, u, b.APIKey, t)
		backend.SetTerms(backends.Terms{APIKey: b.APIKey, MaxInFlight: b.MaxInFlight, Weight: b.Weight, Transport: t, Probe: probe})
		list = append(list, backend)
	}
	var err error
	s.registry, err = backends.NewRegistry(list)
	return err
}

// routerOptions are what the settings come to.
func (s *service) routerOptions() router.Options {
	c := s.config
	return router.Options{
		Backends:      s.registry.All(),
		Catalog:       s.registry.Catalog,
		Policy:        c.Routing.Policy,
		Settings:      c.Routing.settings(),
		Hold:          c.Routing.hold(),
		SLO:           c.SLO.TTFT,
		BlockBytes:    c.Index.BlockBytes,
		IndexMaxBytes: int64(c.Index.MaxBytes),
		PollInterval:  c.Poll.Interval,
		NoLearning:    !c.Routing.Learn,
		Now:           time.Now,
		Rand:          rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}
}

func (c RoutingConfig) settings() policy.Settings {
	return policy.Settings{
		MatchRatio:     c.MatchRatio,
		ImbalanceAbs:   c.ImbalanceAbs,
		ImbalanceRatio: c.ImbalanceRatio,
		LoadFactor:     c.LoadFactor,
	}
}

func (c RoutingConfig) hold() router.HoldOptions {
	return router.HoldOptions{
		Requests:   c.Hold.Requests,
		Bytes:      int64(c.Hold.Bytes),
		Time:       c.Hold.Time,
		StepTokens: c.StepTokens,
	}
}

func (c *Config) proxySettings() proxy.Settings {
	return proxy.Settings{
		Attempts:       c.Routing.Attempts,
		BodyBytes:      int64(c.Limits.BodyBytes),
		BodyBytesTotal: int64(c.Limits.BodyBytesTotal),
		BodyIdle:       c.Timeouts.BodyIdle,
		HoldTime:       c.holdTime(),
		FirstByte:      c.Timeouts.FirstByte,
		Idle:           c.Timeouts.Idle,
		Keepalive:      c.SSE.Keepalive,
		WriteIdle:      c.Timeouts.WriteIdle,
		SessionHeader:  c.Routing.SessionHeader,
		RouteHeaders:   c.ResponseHeaders,
		IsolateTenants: c.Tenant == "isolate",
	}
}
