package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"warmroute/lab/testbed"
)

const (
	// redisOutage is longer than proxies remember the load of others whom they do not hear.
	redisOutage = 6 * time.Second
	// redisRecovery bounds the time until proxies share again after an outage.
	redisRecovery = 5 * time.Second
)

// redisServer is a redis-server process without a disk, on a Unix socket.
type redisServer struct {
	program, dir, socket string
	process              *testbed.Process
}

func (s *redisServer) start(ctx context.Context) (err error) {
	cmd := exec.Command(s.program, "--port", "0", "--unixsocket", s.socket, "--save", "", "--dir", s.dir, "--logfile",
		filepath.Join(s.dir, "redis.log"))
	if s.process, err = testbed.StartProcess(cmd); err != nil {
		return err
	}
	return s.process.Await(ctx, waitTimeout, func(ctx context.Context) bool { return s.do(ctx, "PING") == nil })
}

// do sends a command over a new connection.
func (s *redisServer) do(ctx context.Context, command ...string) error {
	return exec.CommandContext(ctx, "redis-cli", append([]string{"-e", "-s", s.socket}, command...)...).Run()
}

func (s *redisServer) signal(signal syscall.Signal) error {
	return syscall.Kill(s.process.PID(), signal)
}

// breakRedis causes outages of the Redis that two proxies share, under its own load, and restarts
// the proxies.
func breakRedis(ctx context.Context, r *rig) (err error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return fmt.Errorf("%w: install redis-server, or leave out the scenario redis", err)
	}
	server := &redisServer{program: program, dir: r.dir, socket: filepath.Join(r.dir, "redis.sock")}
	if err := server.start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.process.KillAndWait()) }()
	settings := fmt.Sprintf("timeouts: {serve_after_term: 1s}\nredis: {url: %q}", "unix://"+server.socket)
	return r.runTwoProxies(ctx, settings, func(two *twoProxies) error {
		if err := two.awaitShared(ctx, waitTimeout); err != nil {
			return err
		}
		for _, outage := range []struct{ begin, end func() error }{
			{func() error { return server.process.KillAndWait() }, func() error { return server.start(ctx) }},
			{func() error { return server.signal(syscall.SIGSTOP) }, func() error { return server.signal(syscall.SIGCONT) }},
			{func() error {
				return server.do(ctx, "CONFIG", "SET", "maxmemory", "1")
			}, func() error { return server.do(ctx, "CONFIG", "SET", "maxmemory", "0") }},
		} {
			if err := outage.begin(); err != nil {
				return err
			}
			if err := errors.Join(testbed.Sleep(ctx, redisOutage), two.awaitResponses(ctx)); err != nil {
				return err
			}
			if err := outage.end(); err != nil {
				return err
			}
			if err := two.awaitShared(ctx, redisRecovery); err != nil {
				return err
			}
		}
		if err := two.restartInTurn(ctx); err != nil {
			return err
		}
		return two.awaitShared(ctx, redisRecovery+waitTimeout)
	})
}

// awaitShared waits until each proxy is connected to Redis and counts both.
func (two *twoProxies) awaitShared(ctx context.Context, limit time.Duration) error {
	for _, p := range two.proxies {
		err := waitUntil(ctx, limit, "proxies that share over Redis", func() (bool, error) {
			m, err := p.ReadMetrics(ctx)
			return m.Sum("warmroute_redis_connected") == 1 && m.Sum("warmroute_redis_proxies") == 2, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
