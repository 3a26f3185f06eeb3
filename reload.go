package main

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"warmroute/backends"
)

// reload applies what was read: whole, or not at all. Requests under way keep the
// settings of their arrival. It reports whether it was applied.
func (s *service) reload(c *Config, err error) bool {
	var changed []string
	warned := s.config.startWarnings(fileDescriptorLimit()) // said at the start or at an earlier reload
	if err == nil {
		changed = changedSettings(s.config, c, false)
		err = s.apply(c)
	}
	if err != nil {
		s.metrics.Reloaded(false)
		for _, line := range faultLines(err) {
			s.log.Error("configuration not reloaded, the old one stays", "fault", line)
		}
		return false
	}
	s.control.level.UnmarshalText([]byte(c.Log.Level)) // checked with the configuration
	s.metrics.Reloaded(true)
	s.log.Info("configuration reloaded", "changed", changed)
	for _, path := range s.waiting(c) {
		s.log.Warn("setting takes effect at the next start", "setting", path)
	}
	for _, w := range c.startWarnings(fileDescriptorLimit()) {
		if !slices.Contains(warned, w) {
			s.log.Warn(w)
		}
	}
	return true
}

// waiting lists the settings that are not yet what c says.
func (s *service) waiting(c *Config) []string {
	paths := changedSettings(s.started, c, true)
	if s.started.TLS.enabled() != c.TLS.enabled() { // another certificate may come at any time
		paths = append(paths, "tls.cert_file")
	}
	if s.started.AdminTLS.enabled() != c.AdminTLS.enabled() {
		paths = append(paths, "admin_tls.cert_file")
	}
	return paths
}

// apply makes the running service what c says, but for settings marked
// reload:"no". An error leaves all as it was.
func (s *service) apply(c *Config) error {
	if err := c.guardsLess(s.config); err != nil {
		return err
	}
	if err := s.router.Configure(s.routerOptions(c)); err != nil {
		return err
	}
	if err := s.access.Configure(c.AccessLog.settings()); err != nil {
		s.router.Configure(s.routerOptions(s.config)) // which it took before
		return fmt.Errorf("access_log.file: %w", err)
	}
	if err := s.fleet.apply(c); err != nil {
		s.router.Configure(s.routerOptions(s.config))
		s.access.Configure(s.config.AccessLog.settings())
		return err
	}
	if c.TLS.enabled() && s.certificate.Load() != nil {
		s.certificate.Store(c.TLS.pair)
	}
	if c.AdminTLS.enabled() && s.adminCertificate.Load() != nil {
		s.adminCertificate.Store(c.AdminTLS.pair)
	}
	s.proxy.Configure(c.proxySettings())
	s.keys.Replace(c.apiKeys())
	s.admin.SetToken(c.AdminToken)
	s.checker.SetPace(backends.CheckPace(c.Health))
	s.poller.SetPace(backends.PollPace(c.Poll))
	s.config = c
	return nil
}

// guardsLess is a ConfigError of what c lets anybody do that before did not. A
// file that was cut short looks like that, and its defaults are open; so it takes
// a start, by hand or by a hand-over, to mean it.
func (c *Config) guardsLess(before *Config) error {
	const meant = "; if that is meant, restart or hand over to a new process"
	var f faults
	if len(before.Keys) > 0 && len(c.Keys) == 0 {
		f.add("keys", "there are none any more, and everybody would be let in%s", meant)
	}
	if before.AdminToken != "" && c.AdminToken == "" {
		f.add("admin_token", "is gone, and operators would need none%s", meant)
	}
	if before.Tenant == "isolate" && c.Tenant != "isolate" {
		f.add("tenant", "is not isolate any more, and where requests go would tell what others sent%s", meant)
	}
	return f.err()
}

// faultLines are the faults of a configuration, each with its key path.
func faultLines(err error) []string {
	var faults ConfigError
	if errors.As(err, &faults) {
		return faults
	}
	return []string{err.Error()}
}

// changedSettings lists, by path, the settings in which two configurations
// differ: those that wait for the next start, or all others. It has no values,
// some of which are secret.
func changedSettings(a, b *Config, waiting bool) []string {
	return changedFields(reflect.ValueOf(*a), reflect.ValueOf(*b), "", false, waiting)
}

// changedFields is changedSettings for a section; waits says that all of it is
// marked.
func changedFields(a, b reflect.Value, section string, waits, waiting bool) (paths []string) {
	for i := range a.NumField() {
		field := a.Type().Field(i)
		if !field.IsExported() {
			continue
		}
		path, waits := section+field.Tag.Get("mapstructure"), waits || field.Tag.Get("reload") == "no"
		switch {
		case field.Type.Kind() == reflect.Struct:
			paths = append(paths, changedFields(a.Field(i), b.Field(i), path+".", waits, waiting)...)
		case waits == waiting && !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()):
			paths = append(paths, path)
		}
	}
	return paths
}
