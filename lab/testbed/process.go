// Package testbed runs a proxy and its replicas as processes, which programs can kill,
// stop and restart.
package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a running program in its own process group, so that Ctrl-C does not reach
// it and KillAndWait also ends its children. Its methods are safe for concurrent use.
type Process struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has ended
	err    error         // of Wait; set before ended is closed
	killed func() error
}

// StartProcess starts cmd in its own process group, and does not wait for it.
func StartProcess(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, ended: make(chan struct{})}
	p.killed = sync.OnceValue(func() error {
		err := p.signal(syscall.SIGKILL, true)
		<-p.ended
		return err
	})
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	// Children that outlive it may keep its output open.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// startWithLog starts a program whose output is appended to a file, with further variables in its
// environment.
func startWithLog(logPath string, environment []string, program string, args ...string) (*Process, error) {
	out, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the process has its own copy
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), environment...)
	return StartProcess(cmd)
}

// PID returns the ID of the process and of its group.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// signal sends s to the process, or to its group.
func (p *Process) signal(s syscall.Signal, toGroup bool) error {
	pid := p.PID()
	if toGroup {
		pid = -pid
	}
	err := syscall.Kill(pid, s)
	if errors.Is(err, syscall.ESRCH) {
		return nil // it has ended
	}
	return err
}

// KillAndWait kills the process and its children, and waits for it to end. Further calls do
// nothing.
func (p *Process) KillAndWait() error { return p.killed() }

// Terminate sends SIGTERM, and kills the process if it has not ended within limit.
func (p *Process) Terminate(limit time.Duration) error {
	if err := p.signal(syscall.SIGTERM, false); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return errors.Join(p.err, p.KillAndWait()) // its children
	case <-time.After(limit):
		return errors.Join(fmt.Errorf("%s still runs %v after SIGTERM", p.cmd.Path, limit), p.KillAndWait())
	}
}

// CheckAlive returns an error if the process has ended.
func (p *Process) CheckAlive() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s ended: %w", p.cmd.Path, cmp.Or(p.err, errStatus0))
	default:
		return nil
	}
}

var errStatus0 = errors.New("exit status 0")

// Await polls done until it returns true. It fails if the process ends or limit passes
// before.
func (p *Process) Await(ctx context.Context, limit time.Duration, done func(context.Context) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s not ready after %v", p.cmd.Path, limit))
	defer cancel()
	for !done(ctx) {
		select {
		case <-p.ended:
			return p.CheckAlive()
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// awaitOK returns when url responds with 200.
func (p *Process) awaitOK(ctx context.Context, client *http.Client, url string, limit time.Duration) error {
	err := p.Await(ctx, limit, func(ctx context.Context) bool {
		status, err := getStatus(ctx, client, url)
		return err == nil && status == http.StatusOK
	})
	if err != nil {
		return fmt.Errorf("GET %s: no status 200: %w", url, err)
	}
	return nil
}

// getStatus returns the status of url. It uses a new connection, so that none stays open to a
// process that will be killed.
func getStatus(ctx context.Context, client *http.Client, url string) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Close = true
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

const firstPort, lastPort = 20_000, 31_999

// nextPort is where FreePorts looks next; 0: it has not looked yet.
var nextPort struct {
	mu   sync.Mutex
	port int
}

// FreePorts returns n free ports below the ephemeral range, so that no client connection takes the port of a replica that
// is down. No call returns a port that an earlier one has, until all were looked at.
func FreePorts(n int) ([]int, error) {
	nextPort.mu.Lock()
	defer nextPort.mu.Unlock()
	if nextPort.port == 0 { // other processes begin elsewhere
		nextPort.port = firstPort + rand.IntN(lastPort-firstPort)
	}
	var free []int
	for looked := 0; len(free) < n; looked++ {
		if looked > lastPort-firstPort {
			return nil, fmt.Errorf("less than %d free ports between %d and %d", n, firstPort, lastPort)
		}
		port := nextPort.port
		if nextPort.port++; nextPort.port > lastPort {
			nextPort.port = firstPort
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		free = append(free, port)
	}
	return free, nil
}
