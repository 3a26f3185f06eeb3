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

	"warmroute/lab/testbed"
)

// process is a started program with its children.
type process struct {
	*testbed.Process
	name string
	log  string // file with its output
}

// startProcess starts cmd with its output in a file below dir. The process is killed when this
// program ends.
func startProcess(dir, name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log")}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.Process, err = testbed.StartProcess(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// stop kills the process and its children. Some would take long to end by SIGTERM.
func (p *process) stop() { _ = p.KillAndWait() } // it may already have ended

// withLog adds the process's name and the end of its output to err, unless it is nil.
func (p *process) withLog(err error) error {
	if err == nil {
		return nil
	}
	text, _ := os.ReadFile(p.log)
	return fmt.Errorf("%s: %w; output:\n%s", p.name, err, text[max(0, len(text)-2000):])
}

// await polls done until it returns true. It fails if the process ends or limit passes
// before.
func (p *process) await(ctx context.Context, limit time.Duration, done func() bool) error {
	return p.withLog(p.Await(ctx, limit, func(context.Context) bool { return done() }))
}

// tick is the unit of the times in /proc/PID/stat.
const tick = time.Second / 100

// cpuTime returns the user and system time of the process and its children.
func (p *process) cpuTime() (used time.Duration, err error) {
	for _, pid := range processTree(p.PID()) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // a child that has just ended, which its parent's times include
		}
		// The second field is the name, in parentheses; it may contain any character.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		for _, f := range fields[11:15] { // utime, stime, cutime, cstime
			n, err := strconv.ParseInt(f, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
			}
			used += time.Duration(n) * tick
		}
	}
	return used, p.checkAlive()
}

// rss returns the resident memory of the process and its children.
func (p *process) rss() (bytes int64, err error) {
	for _, pid := range processTree(p.PID()) {
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
	return bytes, p.checkAlive()
}

func (p *process) checkAlive() error { return p.withLog(p.CheckAlive()) }

// processTree returns the IDs of the process and its descendants.
func processTree(pid int) []int {
	pids := []int{pid}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, task := range tasks {
		children, _ := os.ReadFile(task)
		for child := range strings.FieldsSeq(string(children)) {
			if n, err := strconv.Atoi(child); err == nil {
				pids = append(pids, processTree(n)...)
			}
		}
	}
	return pids
}
