package server

import (
	"context"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

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

// Serve runs one proxy until ctx is done. It takes sockets from systemd or from a process that hands over to
// this one, reloads the configuration on SIGHUP and when its files change, and hands over to a new process on
// SIGUSR2. If ctx was ended by a signal, its cause is a StopSignal.
func Serve(ctx context.Context, o ServeOptions) (err error) {
	started := time.Now()
	reloads, handOvers := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	defer signal.Stop(reloads)
	relayHandOverSignal(handOvers)
	defer signal.Stop(handOvers)
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
	log, level := NewLogger(c.Log, o.Log)
	log.Info("starting", "version", o.Version, "go", runtime.Version(), "pid", os.Getpid())
	defer func() {
		reason := "handed over"
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
		logLevel: level, watcher: watcher, reloads: reloads, handOvers: handOvers, program: program, inherited: in,
	}})
	if err != nil {
		return err
	}
	log.Info("listening", "public", s.Addr().String(), "tls", c.TLS.Enabled(), "backends", len(c.Backends), "policy", c.Routing.Policy)
	if admin := s.AdminAddr(); admin != nil {
		log.Info("listening", "admin", admin.String(), "tls", c.AdminTLS.Enabled())
	}
	return s.Run(ctx)
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
