package main

import (
	"fmt"
	"slices"

	"warmroute/backends"
	"warmroute/config"
)

// reload applies what was read: whole, or not at all. Requests under way keep the
// settings of their arrival. It reports whether it was applied.
func (s *service) reload(c *config.Config, err error) bool {
	var changed []string
	warned := s.config.StartWarnings(fileDescriptorLimit()) // said at the start or at an earlier reload
	if err == nil {
		changed, _ = config.Diff(s.config, c)
		err = s.apply(c)
	}
	if err != nil {
		s.metrics.RecordReload(false)
		for _, line := range config.ErrorLines(err) {
			s.log.Error("configuration not reloaded, the old one stays", "fault", line)
		}
		return false
	}
	s.control.level.UnmarshalText([]byte(c.Log.Level)) // checked with the configuration
	s.metrics.RecordReload(true)
	s.log.Info("configuration reloaded", "changed", changed)
	for _, path := range s.waiting(c) {
		s.log.Warn("setting takes effect at the next start", "setting", path)
	}
	for _, w := range c.StartWarnings(fileDescriptorLimit()) {
		if !slices.Contains(warned, w) {
			s.log.Warn(w)
		}
	}
	return true
}

// waiting lists the settings that are not yet what c says.
func (s *service) waiting(c *config.Config) []string {
	_, paths := config.Diff(s.started, c)
	if s.started.TLS.Enabled() != c.TLS.Enabled() { // another certificate may come at any time
		paths = append(paths, "tls.cert_file")
	}
	if s.started.AdminTLS.Enabled() != c.AdminTLS.Enabled() {
		paths = append(paths, "admin_tls.cert_file")
	}
	return paths
}

// apply makes the running service what c says, but for settings marked
// reload:"no". An error leaves all as it was.
func (s *service) apply(c *config.Config) error {
	if err := c.CheckNotWeakened(s.config); err != nil {
		return err
	}
	if err := s.router.Configure(routerSettings(c)); err != nil {
		return err
	}
	if err := s.access.Configure(c.AccessLog); err != nil {
		s.router.Configure(routerSettings(s.config)) // which it took before
		return fmt.Errorf("access_log.file: %w", err)
	}
	if err := s.fleet.apply(c); err != nil {
		s.router.Configure(routerSettings(s.config))
		s.access.Configure(s.config.AccessLog)
		return err
	}
	if c.TLS.Enabled() && s.certificate.Load() != nil {
		s.certificate.Store(c.TLS.Certificate)
	}
	if c.AdminTLS.Enabled() && s.adminCertificate.Load() != nil {
		s.adminCertificate.Store(c.AdminTLS.Certificate)
	}
	s.proxy.Configure(proxySettings(c))
	s.keys.Replace(c.APIKeys())
	s.admin.SetToken(c.AdminToken)
	s.checker.SetSettings(backends.HealthSettings(c.Health))
	s.poller.SetSettings(backends.PollSettings(c.Poll))
	s.config = c
	return nil
}
