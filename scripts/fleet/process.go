// Package fleet runs a proxy and its replicas as processes of their own, for
// programs that do to them what happens to processes.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// process is a program that runs, with what it starts, in a process group of
// its own: a Ctrl-C is ours to act upon, and a kill gets them all.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed once it has
	err   error         // why, from then on
}

// run starts a program. It ends by itself or by signal.
func run(out io.Writer, env []string, name string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(name, args...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// What it leaves behind may hold its output open.
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// signal sends s to the process, or to all of its group.
func (p *process) signal(s syscall.Signal, group bool) error {
	pid := p.cmd.Process.Pid
	if group {
		pid = -pid
	}
	err := syscall.Kill(pid, s)
	if errors.Is(err, syscall.ESRCH) {
		return nil // it has ended
	}
	return err
}

// kill ends the process and all that it started, and waits for it.
func (p *process) kill() error {
	err := p.signal(syscall.SIGKILL, true)
	<-p.ended
	return err
}

// end asks the process to end, and kills it when it has not within limit.
func (p *process) end(limit time.Duration) error {
	if err := p.signal(syscall.SIGTERM, false); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return errors.Join(p.err, p.signal(syscall.SIGKILL, true)) // what it left behind
	case <-time.After(limit):
		return errors.Join(fmt.Errorf("%s had not ended %v after SIGTERM", p.cmd.Path, limit), p.kill())
	}
}

// await returns when url answers 200, or an error when that never happens.
func (p *process) await(ctx context.Context, url string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		if status, err := get(ctx, url); err == nil && status == http.StatusOK {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %w", p.cmd.Path, p.err)
		case <-ctx.Done():
			return fmt.Errorf("%s is no 200 after %v", url, limit)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// get asks on a connection of its own, so that none is left open to a process
// that is about to be killed.
func get(ctx context.Context, url string) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
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
