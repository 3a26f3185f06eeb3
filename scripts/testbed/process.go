// Package testbed runs a proxy and its replicas as processes of their own, for
// programs that do to them what happens to processes.
package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a program that runs, with what it starts, in a process group of
// its own: a Ctrl-C is ours to act upon, and a kill gets them all. Its methods are
// safe for concurrent use.
type Process struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed once it has
	err    error         // why, from then on
	killed func() error
}

// Run starts a program, which ends by itself or by End or Kill. Output that cmd
// names no place for is lost.
func Run(cmd *exec.Cmd) (*Process, error) {
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
	// What it leaves behind may hold its output open.
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

// run starts a program whose output is appended to a file.
func run(log, name string, args ...string) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the process has its own
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = out, out
	return Run(cmd)
}

// PID is the process's, and its group's.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// signal sends s to the process, or to all of its group.
func (p *Process) signal(s syscall.Signal, group bool) error {
	pid := p.PID()
	if group {
		pid = -pid
	}
	err := syscall.Kill(pid, s)
	if errors.Is(err, syscall.ESRCH) {
		return nil // it has ended
	}
	return err
}

// Kill ends the process and all that it started, and waits for it. Further calls
// do nothing.
func (p *Process) Kill() error { return p.killed() }

// End asks the process to end, and kills it when it has not within limit.
func (p *Process) End(limit time.Duration) error {
	if err := p.signal(syscall.SIGTERM, false); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return errors.Join(p.err, p.Kill()) // what it left behind
	case <-time.After(limit):
		return errors.Join(fmt.Errorf("%s had not ended %v after SIGTERM", p.cmd.Path, limit), p.Kill())
	}
}

// Alive is an error once the process has ended.
func (p *Process) Alive() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s ended: %w", p.cmd.Path, cmp.Or(p.err, errStatus0))
	default:
		return nil
	}
}

var errStatus0 = errors.New("exit status 0")

// Await returns when done does true, or an error when the process ends before that
// or limit is over.
func (p *Process) Await(ctx context.Context, limit time.Duration, done func(context.Context) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s was not there after %v", p.cmd.Path, limit))
	defer cancel()
	for !done(ctx) {
		select {
		case <-p.ended:
			return p.Alive()
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// await returns when url answers 200.
func (p *Process) await(ctx context.Context, client *http.Client, url string, limit time.Duration) error {
	err := p.Await(ctx, limit, func(ctx context.Context) bool {
		status, err := get(ctx, client, url)
		return err == nil && status == http.StatusOK
	})
	if err != nil {
		return fmt.Errorf("%s is no 200: %w", url, err)
	}
	return nil
}

// get asks on a connection of its own, so that none is left open to a process
// that is about to be killed.
func get(ctx context.Context, client *http.Client, url string) (status int, err error) {
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

// FreePorts returns so many ports that nobody listens on. They lie below those
// that the kernel gives to clients, one of which could else take the port of a
// replica that is down.
func FreePorts(n int) ([]int, error) {
	var ports []int
	for port := 20_000 + os.Getpid()%97*100; len(ports) < n; port++ {
		if port == 32_000 {
			return nil, errors.New("too few free ports between 20000 and 32000")
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		ports = append(ports, port)
	}
	return ports, nil
}
