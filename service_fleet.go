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

func proxySettings(c *config.Config) proxy.Settings {
	return proxy.Settings{
		Attempts:       c.Routing.Attempts,
		InFlight:       c.Limits.InFlight,
		Connections:    c.Limits.Connections,
		QueryBytes:     int(c.Limits.QueryBytes),
		BodyBytes:      int64(c.Limits.BodyBytes),
		BodyBytesTotal: int64(c.Limits.BodyBytesTotal),
		BodyIdle:       c.Timeouts.BodyIdle,
		HoldTime:       c.QueueTime(),
		FirstByte:      c.Timeouts.FirstByte,
		Response:       c.Timeouts.Response,
		Idle:           c.Timeouts.Idle,
		RetryShare:     c.Retry.Share,
		RetryPerSecond: c.Retry.PerSecond,
		RetryStalled:   c.Retry.Stalled,
		RetryTimeouts:  c.Retry.Timeouts,
		Keepalive:      c.SSE.Keepalive,
		WriteIdle:      c.Timeouts.WriteIdle,
		SessionHeader:  c.Routing.SessionHeader,
		RouteHeaders:   c.ResponseHeaders,
		IsolateTenants: c.Tenant == "isolate",
	}
}
