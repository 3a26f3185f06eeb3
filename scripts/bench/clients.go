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

// end is the command that runs one of the ends, in a process of its own.
func (b *bench) end(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.self, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// load asks for whole answers for as long as length. Any failure makes the
// measurement worthless: refusing costs less than relaying.
func (b *bench) load(ctx context.Context, f *front, clients, size int, kind string, length time.Duration) (loaded, error) {
	ctx, cancel := context.WithTimeout(ctx, length+2*patience)
	defer cancel()
	var got loaded
	out, err := b.end(ctx, "load", "-addr", f.addrs, "-clients", strconv.Itoa(clients), "-size", strconv.Itoa(size),
		"-prompts", kind, "-for", length.String(), "-seed", strconv.FormatInt(time.Now().UnixNano(), 10)).Output()
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	switch {
	case err != nil:
		return got, fmt.Errorf("load client: %w", err)
	case got.Failed > 0:
		return got, fmt.Errorf("%d requests failed, the first with: %s", got.Failed, got.Fault)
	case got.Requests == 0:
		return got, errors.New("no request was answered")
	}
	return got, nil
}

// viewers are the clients of many streams, while these are open.
type viewers struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	cancel context.CancelFunc
}

// view opens streams of so many chunks each, interval apart, and returns when
// all are open. They live no longer than limit.
func (b *bench) view(ctx context.Context, f *front, streams, chunks int, interval, limit time.Duration) (*viewers, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	v := &viewers{cancel: cancel, cmd: b.end(ctx, "streams", "-addr", f.addrs, "-streams", strconv.Itoa(streams),
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
		_, err = v.report()
	}
	if err != nil {
		v.close()
		return nil, fmt.Errorf("opening %d streams: %w", streams, err)
	}
	return v, nil
}

// report is what the clients saw since the last report.
func (v *viewers) report() (s streamed, err error) {
	if _, err = io.WriteString(v.in, "\n"); err != nil {
		return s, err
	}
	line, err := v.out.ReadBytes('\n')
	if err != nil {
		return s, err
	}
	if err = json.Unmarshal(line, &s); err == nil && s.Lost > 0 {
		err = fmt.Errorf("%d streams lost, the first with: %s", s.Lost, s.Fault)
	}
	return s, err
}

// close cuts off what is still open.
func (v *viewers) close() {
	v.in.Close()
	_ = v.cmd.Wait() // it was told to end in the midst of its work
	v.cancel()
}
