package server

import (
	"warmroute/backends"
	"warmroute/cluster"
	"warmroute/config"
	"warmroute/metrics"
	"warmroute/router"
	"warmroute/router/responseindex"
)

// peerReporters report to the other proxies. They are nil if there are none.
type peerReporters struct {
	outbox     *cluster.Outbox
	placements router.PlacementReporter
	responses  responseindex.Reporter
}

func newPeerReporters(c *config.Config) peerReporters {
	if c.Redis.URL == "" {
		return peerReporters{}
	}
	outbox := cluster.NewOutbox()
	return peerReporters{outbox, outbox, outbox}
}

func (s *Server) openCluster(outbox *cluster.Outbox, registry *backends.Registry) (err error) {
	if outbox == nil {
		return nil
	}
	s.cluster, err = cluster.New(cluster.Options{
		Settings: s.config.Redis, BlockBytes: s.config.Index.BlockBytes, Outbox: outbox, Router: s.router,
		Registry: registry, Responses: s.responses, Keys: s.keys, Snapshot: s.snapshots, Log: s.log, Panics: s.panics,
	})
	if err != nil {
		return err
	}
	s.metrics.RegisterRedis(func() metrics.RedisStats { return s.cluster.Status().RedisStats })
	return nil
}
