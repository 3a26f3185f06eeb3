package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/recovery"
)

const (
	// watchInterval is how often the configuration's files are checked for changes.
	watchInterval = time.Second
	// maxWatchedBytes is how much of one file is checked.
	maxWatchedBytes = 16 << 20
)

// applyReload applies a configuration whole, or not at all if it could not be loaded. Requests in flight keep
// the settings of their arrival. It reports whether it was applied.
func (s *Server) applyReload(c *config.Config, loadErr error) (applied bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := loadErr
	known := s.config.Warnings(s.policies) // logged at the start or by an earlier reload
	var apply func()
	if err == nil {
		apply, err = s.prepareReload(c)
	}
	s.fleet.SetReloadError(err)
	if err != nil {
		s.metrics.RecordReload(false)
		for _, line := range config.ErrorLines(err) {
			s.log.Error("config reload failed, keeping previous config", "err", line)
		}
		return false
	}
	changed := s.appliedChanges(c)
	apply()
	s.metrics.RecordReload(true)
	s.log.Info("config reloaded", "changed", changed)
	for _, path := range s.settingsNeedingRestart(c) {
		s.log.Warn("setting change requires a restart", "setting", path)
	}
	for _, w := range c.Warnings(s.policies) {
		if !slices.Contains(known, w) {
			s.log.Warn(w)
		}
	}
	s.warnIfMoreDescriptorsNeeded(c)
	return true
}

// countReplicas returns how many replicas the fleet has, whatever they come from. The ranks of one are one.
func (s *Server) countReplicas() (n int) {
	servers := map[*backends.Backend]bool{}
	for _, b := range s.registry.All() {
		servers[b.Server()] = true
	}
	return len(servers)
}

// applyFleetSize has the proxy keep as many connections of clients as the replicas of the fleet leave file descriptors for.
func (s *Server) applyFleetSize() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.countReplicas(); n != s.replicas {
		s.replicas = n
		s.proxy.Configure(s.config.ProxySettings(fileDescriptorLimit(), n))
		s.warnIfMoreDescriptorsNeeded(s.config)
	}
}

// warnIfMoreDescriptorsNeeded warns if a configuration may need more file descriptors than the process may have,
// and a tenth more than the last time: each backend that is added needs some.
func (s *Server) warnIfMoreDescriptorsNeeded(c *config.Config) {
	replicas := s.countReplicas()
	need := c.MaxFileDescriptors(replicas)
	warning := c.DescriptorWarning(fileDescriptorLimit(), replicas)
	if warning != "" && need > s.warnedDescriptors+s.warnedDescriptors/10 {
		s.log.Warn(warning)
		s.warnedDescriptors = need
	}
}

// appliedChanges returns the paths of the settings in c that differ from those in use and take effect
// without a restart.
func (s *Server) appliedChanges(c *config.Config) (paths []string) {
	paths, _ = config.Diff(s.config, c)
	for _, path := range s.settingsNeedingRestart(c) {
		if section, isTLS := strings.CutSuffix(path, "cert_file"); isTLS { // its key_file neither
			paths = slices.DeleteFunc(paths, func(p string) bool { return strings.HasPrefix(p, section) })
		}
	}
	return paths
}

// settingsNeedingRestart returns the paths of the settings in c that take effect at a restart.
func (s *Server) settingsNeedingRestart(c *config.Config) (paths []string) {
	_, paths = config.Diff(s.started, c)
	if s.started.TLS.Enabled() != c.TLS.Enabled() { // another certificate needs no restart
		paths = append(paths, "tls.cert_file")
	}
	if s.started.AdminTLS.Enabled() != c.AdminTLS.Enabled() {
		paths = append(paths, "admin_tls.cert_file")
	}
	return paths
}

// prepareReload does all that can fail before a configuration is put into use, and changes nothing. apply,
// which cannot fail and must be called, puts it into use, but for settings that need a restart.
func (s *Server) prepareReload(c *config.Config) (apply func(), err error) {
	if err := c.CheckNotWeakened(s.config); err != nil {
		return nil, err
	}
	var logLevel slog.Level
	if err := logLevel.UnmarshalText([]byte(c.Log.Level)); err != nil {
		return nil, fmt.Errorf("log.level: %w", err)
	}
	applyRouterSettings, err := s.router.PrepareSettings(c.RouterSettings())
	if err != nil {
		return nil, err
	}
	updateFleet, err := s.fleet.PrepareConfig(context.Background(), c)
	if err != nil {
		return nil, err
	}
	// Last, since what it opens is closed only in use.
	applyAccessLogSettings, err := s.accessLog.PrepareSettings(c.AccessLog)
	if err != nil {
		return nil, fmt.Errorf("access_log.file: %w", err)
	}
	return func() {
		if s.process.logLevel != nil {
			s.process.logLevel.Set(logLevel)
		}
		applyRouterSettings()
		applyAccessLogSettings()
		updateFleet()
		s.listeners.public.replaceCertificate(c.TLS)
		if s.listeners.admin != nil {
			s.listeners.admin.replaceCertificate(c.AdminTLS)
		}
		s.proxy.Configure(c.ProxySettings(fileDescriptorLimit(), s.countReplicas()))
		s.registration.Configure(c)
		s.keys.Replace(c.APIKeys())
		s.responses.Configure(c.Responses)
		s.hookCaller.configure(c.StartHooks)
		s.admin.SetToken(c.AdminToken)
		s.checker.SetSettings(c.Health)
		s.poller.SetSettings(c.Poll)
		s.config = c
	}, nil
}

// configWatcher loads the configuration when asked to and when its files change. Not safe for concurrent use.
type configWatcher struct {
	file     string // the configuration's own; empty: none
	loadFunc func() (*config.Config, error)

	names   []string // of the files that are watched
	applied uint64   // fingerprint of what was loaded
	last    uint64   // of the previous check
}

type loadResult struct {
	config *config.Config
	err    error
}

func newConfigWatcher(file string, load func() (*config.Config, error)) *configWatcher {
	return &configWatcher{file: file, loadFunc: load, names: (&config.Config{}).WatchedFiles(file)}
}

// loadAndTrackFiles loads the configuration. The fingerprint of its files is taken before, so that
// no change in between is missed; and as only the configuration says which those
// are, it is loaded once more if it names others than before, accepted or not.
func (w *configWatcher) loadAndTrackFiles() (c *config.Config, err error) {
	for range 2 {
		w.recordFileHashes()
		c, err = w.loadFunc()
		if c == nil || slices.Equal(c.WatchedFiles(w.file), w.names) {
			return c, err
		}
		w.names = c.WatchedFiles(w.file)
		if w.file != "" && config.CheckRegular(w.file) != nil { // a pipe cannot be read twice
			w.recordFileHashes()
			return c, err
		}
	}
	return c, err
}

// loadIfRegular is loadAndTrackFiles for a service that runs: a pipe cannot be read again.
func (w *configWatcher) loadIfRegular() (*config.Config, error) {
	if w.file != "" {
		if err := config.CheckRegular(w.file); err != nil {
			w.recordFileHashes()
			return nil, err
		}
	}
	return w.loadAndTrackFiles()
}

// startWatching starts the goroutine that sends what it loads on each signal, and when the files have
// changed, until ctx is done; then it closes ended. A network file system may block that for ever, so
// nobody should wait for it long. w may be nil: then nothing is sent.
func (w *configWatcher) startWatching(ctx context.Context, signals <-chan os.Signal, panics recovery.Reporter) (loaded <-chan loadResult,
	ended <-chan struct{}) {
	results, done := make(chan loadResult), make(chan struct{})
	if w == nil {
		close(done)
		return nil, done
	}
	send := func() {
		c, err := w.loadIfRegular()
		select {
		case results <- loadResult{c, err}:
		case <-ctx.Done():
		}
	}
	watch := func(ctx context.Context) {
		ticks := time.NewTicker(watchInterval)
		defer ticks.Stop()
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-signals:
				send()
			case <-ticks.C:
				if w.checkSettledChange() {
					send()
				}
			}
		}
	}
	go func() {
		defer close(done)
		panics.RunLoop(ctx, recovery.ConfigReload, watch)
	}()
	return results, done
}

// recordFileHashes reads the watched files, and takes their content as that which is loaded.
func (w *configWatcher) recordFileHashes() {
	w.applied, _ = hashFiles(w.names)
	w.last = w.applied
}

// checkSettledChange reads the files and reports whether their content differs from what was loaded, and is the
// same as at the previous check: files that are half written, or half of a pair, get one interval to be
// completed. Files that could not be read for lack of a descriptor have not changed.
func (w *configWatcher) checkSettledChange() (changed bool) {
	now, outOfDescriptors := hashFiles(w.names)
	if outOfDescriptors {
		return false
	}
	settled := now == w.last
	w.last = now
	return settled && now != w.applied
}

// hashFiles returns a hash of the files' content. It reads them, which costs microseconds, instead of asking
// the kernel for events: so an editor's rename, Kubernetes' swapped symlinks, a bind mount and a network disk
// are all the same. A file that is not regular, such as a pipe, could be read only once and never changes.
// outOfDescriptors is set if there was no file descriptor to read one of them with.
func hashFiles(names []string) (sum uint64, outOfDescriptors bool) {
	hash := xxh3.New()
	for _, name := range names {
		hash.WriteString(name + "\x00")
		if info, err := os.Stat(name); err != nil {
			hash.WriteString("\x00absent\x00")
			continue
		} else if !info.Mode().IsRegular() {
			continue
		}
		file, err := os.Open(name)
		if err == nil {
			io.Copy(hash, io.LimitReader(file, maxWatchedBytes))
			file.Close()
		}
		outOfDescriptors = outOfDescriptors || transport.IsOutOfDescriptors(err)
	}
	return hash.Sum64(), outOfDescriptors
}
