package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// newRoleCommand returns a command, not started, that runs a role of this program (a
// client) as a process.
func (b *bench) newRoleCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.self, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// runLoadClient sends requests without streams for length. A failed request makes the
// measurement invalid, since a refusal costs less than relaying.
func (b *bench) runLoadClient(ctx context.Context, f *contender, clients, size int, kind string, length time.Duration) (loadResult, error) {
	ctx, cancel := context.WithTimeout(ctx, length+2*ioTimeout)
	defer cancel()
	var got loadResult
	out, err := b.newRoleCommand(ctx, "load", "-addr", f.addrs, "-clients", strconv.Itoa(clients), "-size", strconv.Itoa(size),
		"-prompts", kind, "-for", length.String(), "-seed", strconv.FormatInt(time.Now().UnixNano(), 10)).Output()
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	switch {
	case err != nil:
		return got, fmt.Errorf("load client: %w", err)
	case got.Failed > 0:
		return got, fmt.Errorf("%d requests failed, the first with: %s", got.Failed, got.FirstError)
	case got.Requests == 0:
		return got, errors.New("no request was completed")
	}
	return got, nil
}

// streamProcess is a process that reads many streams (see runStreams).
type streamProcess struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	cancel context.CancelFunc
}

// openStreams starts a process that opens streams of the given number of chunks and
// interval, and returns when all are open. The process is killed after limit.
func (b *bench) openStreams(ctx context.Context, f *contender, streams, chunks int, interval, limit time.Duration) (*streamProcess, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	v := &streamProcess{cancel: cancel, cmd: b.newRoleCommand(ctx, "streams", "-addr", f.addrs, "-streams", strconv.Itoa(streams),
		"-chunks", strconv.Itoa(chunks), "-interval", strconv.FormatInt(interval.Milliseconds(), 10))}
	var err error
	if v.in, err = v.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := v.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	v.out = bufio.NewReader(out)
	if err = v.cmd.Start(); err != nil {
		return nil, err
	}
	if _, err = v.out.ReadString('\n'); err == nil {
		_, err = v.requestReport()
	}
	if err != nil {
		v.closeAndWait()
		return nil, fmt.Errorf("opening %d streams: %w", streams, err)
	}
	return v, nil
}

// requestReport asks the process for what it measured since the last report, and fails
// if a stream was lost.
func (v *streamProcess) requestReport() (s streamResult, err error) {
	if _, err = io.WriteString(v.in, "\n"); err != nil {
		return s, err
	}
	line, err := v.out.ReadBytes('\n')
	if err != nil {
		return s, err
	}
	if err = json.Unmarshal(line, &s); err == nil && s.Lost > 0 {
		err = fmt.Errorf("%d streams lost, the first with: %s", s.Lost, s.FirstError)
	}
	return s, err
}

// closeAndWait closes the streams and waits until the process has ended.
func (v *streamProcess) closeAndWait() {
	v.in.Close()
	_ = v.cmd.Wait() // it was interrupted
	v.cancel()
}
