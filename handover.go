package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// handOverWait is how long a new process has until it serves: to read its
	// configuration and a snapshot, and to check every replica once.
	handOverWait = time.Minute
	// endWait is how long a new process that does not serve yet has to end.
	endWait = 5 * time.Second
)

// errHandedOver ends govern when another process serves the listeners.
var errHandedOver = errors.New("handed over")

// successor is a process that was given the listeners. The zero value is none.
type successor struct {
	pid    int
	serves chan error      // nil once it serves, else why it never will
	end    func(os.Signal) // ends it, in good order if it serves
}

// handOver begins a hand-over, unless one is under way.
func (s *service) handOver(f *front, before successor) successor {
	if before.serves != nil {
		s.log.Warn("a hand-over is under way already", "pid", before.pid)
		return before
	}
	next, err := s.startSuccessor(f)
	if err != nil {
		s.log.Error("not handed over, this process goes on", "reason", err.Error())
		return successor{}
	}
	s.log.Info("handing over", "pid", next.pid, "program", s.control.program)
	return next
}

// handedOver is for when the successor serves.
func (s *service) handedOver(pid int) error {
	s.log.Info("handed over; what is in flight here ends here", "pid", pid)
	s.tellSystemd("MAINPID=" + strconv.Itoa(pid))
	return errHandedOver
}

// startSuccessor starts this program's file anew, as it is on the disk now, with
// the same arguments and the listeners.
func (s *service) startSuccessor(f *front) (successor, error) {
	if err := mayHandOver(os.Getpid()); err != nil {
		return successor{}, err
	}
	if s.snapshot != nil {
		s.snapshot.save() // for the new process to read
	}
	heard, told, err := os.Pipe()
	if err != nil {
		return successor{}, err
	}
	defer told.Close() // so that the pipe ends with the new process
	cmd := exec.Command(s.control.program, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	var names []string
	for _, d := range f.doors {
		file, err := duplicate(d.listener)
		if err != nil {
			heard.Close()
			return successor{}, fmt.Errorf("the %s listener cannot be passed on: %w", d.name, err)
		}
		defer file.Close()
		names, cmd.ExtraFiles = append(names, d.name), append(cmd.ExtraFiles, file)
	}
	cmd.ExtraFiles = append(cmd.ExtraFiles, told)
	cmd.Env = append(os.Environ(), // inherit took the variables of our own start out
		settingsVariable+"="+s.started.Listen+" "+s.started.Admin,
		instanceVariable+"="+s.instance,
		"LISTEN_FDS="+strconv.Itoa(len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"),
		readyVariable+"="+strconv.Itoa(firstInherited+len(names)))
	if s.control.before.kept {
		cmd.Env = append(cmd.Env, keptVariable+"=1")
	}
	if err := cmd.Start(); err != nil {
		heard.Close()
		return successor{}, err
	}
	next := newSuccessor(cmd, heard)
	f.serving.Go(func() { next.serves <- awaitSuccessor(cmd, heard) })
	return next, nil
}

// newSuccessor is for a process that was started and says through heard that it serves.
func newSuccessor(cmd *exec.Cmd, heard *os.File) successor {
	heard.SetReadDeadline(time.Now().Add(handOverWait))
	end := func(s os.Signal) {
		cmd.Process.Signal(s)
		heard.SetReadDeadline(time.Now().Add(endWait))
	}
	return successor{pid: cmd.Process.Pid, serves: make(chan error, 1), end: end}
}

// mayHandOver says why the process with that id cannot hand over, or nil.
func mayHandOver(pid int) error {
	if pid == 1 {
		return errors.New("this is process 1 of its container, which ends with it; start another container and stop this one with SIGTERM")
	}
	return nil
}

// awaitSuccessor waits until the new process says that it serves. One that does
// not is ended.
func awaitSuccessor(cmd *exec.Cmd, heard *os.File) error {
	defer heard.Close()
	_, err := io.ReadFull(heard, make([]byte, 1))
	if err == nil {
		return nil
	}
	cmd.Process.Kill()
	cmd.Wait()
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the new process ended before it served: %v", cmd.ProcessState)
	}
	return fmt.Errorf("the new process did not serve within %v", handOverWait)
}

// leave ends a service whose listeners another process has. What was accepted
// here is answered here, and so is what still comes on connections that clients
// have kept open, with word to connect anew: to close those at once would lose
// a request that is on its way. They are closed when nothing came or was in flight
// for timeouts.drain.
func (s *service) leave(ctx context.Context, f *front) error {
	f.stopListening()
	s.admin.EndEvents() // so that pages look at the new process
	end := time.Now().Add(s.config.Timeouts.Shutdown)
	untilEnd, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	s.awaitQuiet(untilEnd, max(s.config.Timeouts.Drain, minQuiet))
	if ctx.Err() != nil {
		s.router.Drain()
	}
	limit, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	return s.finish(limit, f)
}

// ownProgram is the path that this process was started by: what is there later
// may be another version.
func ownProgram() (string, error) {
	if path, err := exec.LookPath(os.Args[0]); err == nil {
		return filepath.Abs(path)
	}
	return os.Executable()
}
