package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"

	"warmroute/backends"
)

// reloader reads the configuration of a running service anew and applies it.
// Not safe for concurrent use.
type reloader struct {
	load    func() (*Config, error) // as at the start, from the same flags
	started *Config                 // as at the start
	level   *slog.LevelVar
	files   fileWatch
}

// newReloader is for a service that was made of what load returned.
func newReloader(s *service, file string, load func() (*Config, error), level *slog.LevelVar) *reloader {
	r := &reloader{started: s.config, level: level}
	r.load = func() (*Config, error) {
		if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is no plain file and cannot be read a second time", file)
		}
		return load()
	}
	r.files.names = func() []string {
		all := append(s.config.TLS.files(), file, s.config.KeysFile, s.config.AdminTokenFile)
		for _, b := range s.config.Backends {
			all = append(all, b.CAFile)
		}
		return slices.DeleteFunc(all, func(name string) bool { return name == "" })
	}
	r.files.note()
	return r
}

// run applies the configuration as it is now: whole, or not at all. Requests
// under way keep the settings of their arrival.
func (r *reloader) run(s *service) {
	r.files.note()
	c, err := r.load()
	var changed []string
	if err == nil {
		changed = changedSettings(s.config, c, false)
		err = s.apply(c)
	}
	if err != nil {
		s.metrics.Reloaded(false)
		for _, line := range faultLines(err) {
			s.log.Error("configuration not reloaded, the old one stays", "fault", line)
		}
		return
	}
	r.level.UnmarshalText([]byte(c.Log.Level)) // checked with the configuration
	s.metrics.Reloaded(true)
	s.log.Info("configuration reloaded", "changed", changed)
	for _, path := range r.waiting(c) {
		s.log.Warn("setting takes effect at the next start", "setting", path)
	}
	c.warn(s.log)
}

// waiting lists the settings that are not yet what c says.
func (r *reloader) waiting(c *Config) []string {
	paths := changedSettings(r.started, c, true)
	if r.started.TLS.enabled() != c.TLS.enabled() { // another certificate may come at any time
		paths = append(paths, "tls.cert_file")
	}
	return paths
}

// apply makes the running service what c says, but for settings marked
// reload:"no". An error leaves all as it was.
func (s *service) apply(c *Config) error {
	var certificate *tls.Certificate
	if c.TLS.enabled() && s.certificate.Load() != nil {
		var blame string
		var err error
		if certificate, blame, err = c.TLS.load(); err != nil { // it was checked a moment ago
			return fmt.Errorf("%s: %w", blame, err)
		}
	}
	if err := s.fleet.apply(c); err != nil {
		return err
	}
	if err := s.router.Configure(s.routerOptions(c)); err != nil {
		return err
	}
	if certificate != nil {
		s.certificate.Store(certificate)
	}
	s.proxy.Configure(c.proxySettings())
	s.keys.Replace(c.apiKeys())
	s.admin.SetToken(c.AdminToken)
	s.checker.SetPace(backends.CheckPace(c.Health))
	s.poller.SetPace(backends.PollPace(c.Poll))
	s.config = c
	return nil
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
