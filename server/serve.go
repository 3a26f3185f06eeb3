package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"warmroute/atomicfile"
	"warmroute/config"
	"warmroute/router/policy"
)

// ServeOptions are what Serve needs of a command line. Load, Log and Version are required.
type ServeOptions struct {
	File     string                         // the configuration's file; empty: none
	Load     func() (*config.Config, error) // as config.Loader.Load: it returns what it could read beside an error
	Policies policy.Registry                // those of the config.Loader
	Log      io.Writer
	Version  string
}

// Serve runs one proxy until ctx is done. It takes sockets from systemd or from a process that
// this one replaces, reloads the configuration on SIGHUP and when its files change, and starts a binary upgrade on
// SIGUSR2. If ctx was ended by a signal, its cause is a StopSignal.
func Serve(ctx context.Context, o ServeOptions) (err error) {
	started := time.Now()
	reloads, upgrades := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	defer signal.Stop(reloads)
	relayUpgradeSignal(upgrades)
	defer signal.Stop(upgrades)
	program, err := programPath()
	if err != nil {
		return err
	}
	in, err := inheritListeners()
	if err != nil {
		return err
	}
	watcher := newConfigWatcher(o.File, o.Load)
	c, err := watcher.loadAndTrackFiles()
	if err != nil {
		return err
	}
	tokenCreated := c.AdminTokenMissing()
	if tokenCreated {
		if c.AdminToken, err = createAdminToken(c.AdminTokenFile); err != nil {
			return fmt.Errorf("admin_token_file: %w", err)
		}
		watcher.recordFileHashes()
	}
	log, level := NewLogger(c.Log, o.Log)
	log.Info("starting", "version", o.Version, "go", runtime.Version(), "pid", os.Getpid())
	defer func() {
		reason := "binary upgrade"
		if err != nil {
			reason = err.Error()
		} else if ctx.Err() != nil {
			reason = stopSignalOf(ctx).String()
		}
		log.Info("stopped", "reason", reason, "uptime", time.Since(started).Round(time.Millisecond))
	}()
	for _, w := range c.Warnings(o.Policies) {
		log.Warn(w)
	}
	s, err := New(Options{Config: c, Policies: o.Policies, Log: log, Version: o.Version, process: process{
		logLevel: level, watcher: watcher, reloads: reloads, upgrades: upgrades, program: program, inherited: in,
	}})
	if err != nil {
		return err
	}
	log.Info("listening", "public", s.Addr().String(), "tls", c.TLS.Enabled(), "backends", len(c.Backends), "policy", c.Routing.Policy)
	if admin := s.AdminAddr(); admin != nil {
		log.Info("listening", "admin", admin.String(), "tls", c.AdminTLS.Enabled())
	}
	if sockets := s.listeners.kvEvents; len(sockets) > 0 {
		log.Info("listening", "kv_events", sockets[0].Addr().String(), "ports", len(sockets))
	}
	if admin := s.AdminAddr(); tokenCreated && admin != nil {
		page := "http://" + config.LocalAddr(admin.String())
		if c.AdminTLS.Enabled() {
			page = "https://" + config.LocalAddr(admin.String())
		}
		log.Info("admin token created; the live page asks for it", "file", c.AdminTokenFile, "page", page)
	}
	return s.Run(ctx)
}

// createAdminToken creates a file with a random token and returns the token, or that of the file if another process has
// created it.
func createAdminToken(file string) (string, error) {
	token := rand.Text()
	err := atomicfile.Create(file, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, token)
		return err
	})
	if !errors.Is(err, fs.ErrExist) {
		return token, err
	}
	data, err := config.ReadRegularFile(file)
	return strings.TrimSpace(string(data)), err
}

// StopSignal is the cause with which a signal ends the context of Serve.
type StopSignal struct{ os.Signal }

func (s StopSignal) Error() string { return "stopped by " + s.String() }

// stopSignalOf returns the signal that ended ctx, os.Interrupt if there was none.
func stopSignalOf(ctx context.Context) os.Signal {
	if cause, ok := context.Cause(ctx).(StopSignal); ok {
		return cause.Signal
	}
	return os.Interrupt
}
