package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"warmroute/scripts/testbed"
)

// process is a program that was started here, with all that it started itself.
type process struct {
	*testbed.Process
	name string
	log  string // file with what it said
}

// start runs a command whose output goes to a file below dir. The command dies
// with us, whatever kills us.
func start(dir, name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log")}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.Process, err = testbed.Run(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// stop kills the process and its children: nothing of theirs is wanted, and some
// take their time to end in order.
func (p *process) stop() { _ = p.Kill() } // of a group of ours, which at worst is gone

// failure is err, if there is one, with the last that the process said.
func (p *process) failure(err error) error {
	if err == nil {
		return nil
	}
	text, _ := os.ReadFile(p.log)
	return fmt.Errorf("%s: %w; it said:\n%s", p.name, err, text[max(0, len(text)-2000):])
}

// await calls done until it is true, and fails when the process ends meanwhile
// or limit is over.
func (p *process) await(ctx context.Context, limit time.Duration, done func() bool) error {
	return p.failure(p.Await(ctx, limit, func(context.Context) bool { return done() }))
}

// tick is the unit of /proc/PID/stat's times on every Linux that Go runs on.
const tick = time.Second / 100

// cpu is the time, user and system, that the process and its children have used.
func (p *process) cpu() (used time.Duration, err error) {
	for _, pid := range tree(p.PID()) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // a child that has just ended: its parent accounts for it
		}
		// The second field is the name, in parentheses, and may hold anything.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		for _, f := range fields[11:15] { // utime, stime, cutime, cstime
			n, err := strconv.ParseInt(f, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
			}
			used += time.Duration(n) * tick
		}
	}
	return used, p.alive()
}

// rss is the bytes of memory that the process and its children have in use.
func (p *process) rss() (bytes int64, err error) {
	for _, pid := range tree(p.PID()) {
		rollup, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(rollup), "\nRss:")
		var kb int64
		if _, err := fmt.Sscan(rest, &kb); err != nil {
			return 0, fmt.Errorf("/proc/%d/smaps_rollup: %w", pid, err)
		}
		bytes += kb << 10
	}
	return bytes, p.alive()
}

func (p *process) alive() error { return p.failure(p.Alive()) }

// tree is the process and its descendants.
func tree(pid int) []int {
	pids := []int{pid}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, task := range tasks {
		children, _ := os.ReadFile(task)
		for child := range strings.FieldsSeq(string(children)) {
			if n, err := strconv.Atoi(child); err == nil {
				pids = append(pids, tree(n)...)
			}
		}
	}
	return pids
}
