package main

import (
	"fmt"

	"warmroute/cli"
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/tracing"
)

// watchRequests makes what tells of single requests: the access log and the traces.
func (s *service) watchRequests(m *metrics.Metrics) (err error) {
	if s.access, err = accesslog.New(s.config.AccessLog, s.log); err != nil {
		return fmt.Errorf("access_log.file: %w", err)
	}
	m.RegisterAccessLog(s.access.Dropped)
	if s.traces, err = tracing.New(cli.Version(), s.log); err != nil {
		// A variable that all services of a host may share is no reason not to serve.
		s.log.Warn("requests are not traced", "err", err)
	}
	if s.traces != nil {
		m.RegisterTracing(s.traces.Sent, s.traces.Failed, s.traces.Dropped)
	}
	return nil
}
