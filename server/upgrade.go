package server

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/activation"

	"warmroute/config"
	"warmroute/kvevents"
)

const (
	// upgradeTimeout bounds how long a new process takes until it serves: it reads its
	// configuration and a snapshot, and checks every backend once.
	upgradeTimeout = time.Minute
	// childExitTimeout bounds how long a new process that does not serve yet takes to exit.
	childExitTimeout = 5 * time.Second

	// upgradeVariable has the upgradeState for the new process.
	upgradeVariable = "LISTEN_UPGRADE"
	// firstInheritedFD is the descriptor of the first socket that a process is passed (SD_LISTEN_FDS_START).
	firstInheritedFD = 3
)

// errUpgraded ends runEventLoop when another process serves the listeners.
var errUpgraded = errors.New("binary upgrade done")

// upgradeState is what a process tells the one of a binary upgrade, beside the
// sockets, which are passed as systemd does it.
type upgradeState struct {
	ReadyFD  int    // of a pipe: a byte says that the new process serves, end of file that it never will
	Listen   string // settings with which the sockets were opened or inherited
	Admin    string
	KVEvents kvevents.Settings
	Instance string // requests that come back to the listener's address reach either process
	// SystemdSocket is set if systemd keeps the public socket open when the process ends.
	SystemdSocket bool
}

// inherited is what this process was passed at its start: by systemd's socket
// activation, or by the warmroute that it replaces. All may be zero.
type inherited struct {
	upgradeState
	public, admin net.Listener
	kvEvents      []net.Listener
	ready         *os.File // nil: there is no predecessor
}

// inheritListeners takes the sockets that the environment names, and removes the variables from
// it. Sockets are told apart by their names, public and admin, else by their order.
func inheritListeners() (*inherited, error) {
	in := &inherited{}
	state := os.Getenv(upgradeVariable)
	os.Unsetenv(upgradeVariable)
	if state != "" {
		if err := json.Unmarshal([]byte(state), &in.upgradeState); err != nil {
			return nil, fmt.Errorf("%s is invalid: %w", upgradeVariable, err)
		}
		in.ready = os.NewFile(uintptr(in.ReadyFD), "ready")
		// The predecessor could not know the process ID.
		os.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
	}
	files := activation.Files(true)
	if state == "" && len(files) > 2 {
		return nil, fmt.Errorf("LISTEN_FDS is %d: pass at most two sockets, one for listen and one for admin", len(files))
	}
	var unnamed []net.Listener
	for _, file := range files {
		l, err := net.FileListener(file)
		file.Close() // the listener has a descriptor of its own
		if err != nil {
			return nil, fmt.Errorf("%s, passed in LISTEN_FDS, is not a listening socket: %w", file.Name(), err)
		}
		stopDroppingConnections(l) // an earlier process may have ended after dropNewConnections
		switch name := file.Name(); {
		case name == "public" && in.public == nil:
			in.public = l
		case name == "admin" && in.admin == nil:
			in.admin = l
		case name == "kv_events" && state != "":
			in.kvEvents = append(in.kvEvents, l)
		default:
			unnamed = append(unnamed, l)
		}
	}
	for _, l := range unnamed {
		if in.public == nil {
			in.public = l
		} else {
			in.admin = l
		}
	}
	in.SystemdSocket = in.public != nil && (in.SystemdSocket || in.ready == nil)
	return in, nil
}

// closeReplaced closes the sockets of a binary upgrade whose settings have changed. Their addresses alone would not
// tell: those of systemd's sockets need not be those of the settings.
func (in *inherited) closeReplaced(c *config.Config) {
	if in.ready == nil {
		return
	}
	if in.public != nil && in.Listen != c.Listen {
		in.public.Close()
		in.public, in.SystemdSocket = nil, false
	}
	if in.admin != nil && in.Admin != c.Admin {
		in.admin.Close()
		in.admin = nil
	}
	if in.KVEvents != c.KVEvents {
		closeSockets(in.kvEvents)
		in.kvEvents = nil
	}
}

func (in *inherited) notifyPredecessor() error {
	if in.ready == nil {
		return nil
	}
	_, err := in.ready.Write([]byte{1})
	return cmp.Or(err, in.ready.Close())
}

// listen returns the inherited listeners and opens those that were not, so that a port that is taken is an
// error before anything runs. admin is nil if the configuration has none.
func (in *inherited) listen(c *config.Config) (public, admin net.Listener, err error) {
	in.closeReplaced(c)
	if public = in.public; public == nil {
		if public, err = listenTCP(c.Listen); err != nil {
			return nil, nil, ListenError("--listen", c.Listen, err)
		}
	}
	switch admin = in.admin; {
	case c.Admin == "" && admin != nil:
		admin.Close()
		return public, nil, nil
	case c.Admin == "" || admin != nil:
		return public, admin, nil
	}
	if admin, err = listenTCP(c.Admin); err != nil {
		public.Close()
		return nil, nil, ListenError("--admin", c.Admin, err)
	}
	return public, admin, nil
}

// listenForKVEvents returns the inherited listeners for KV events, or opens those of the configuration; none if it has none.
func (in *inherited) listenForKVEvents(c *config.Config) (sockets []net.Listener, err error) {
	if in.kvEvents != nil {
		return in.kvEvents, nil
	}
	addresses, err := c.KVEvents.Addresses()
	if err != nil {
		return nil, fmt.Errorf("kv_events.listen: %w", err)
	}
	for _, address := range addresses {
		socket, err := listenTCP(address)
		if err != nil {
			closeSockets(sockets)
			return nil, ListenError("kv_events.listen", address, err)
		}
		sockets = append(sockets, socket)
	}
	return sockets, nil
}

// childProcess is a process that was passed the listeners. The zero value is none.
type childProcess struct {
	pid    int
	serves chan error      // nil once it serves, else why it never will
	stop   func(os.Signal) // ends it with the signal, gracefully if it serves
}

// startUpgrade begins a binary upgrade, unless one is in progress, and returns the one in progress.
func (s *Server) startUpgrade(inProgress childProcess) childProcess {
	if inProgress.serves != nil {
		s.log.Warn("binary upgrade already in progress", "pid", inProgress.pid)
		return inProgress
	}
	child, err := s.startChild()
	if err != nil {
		s.log.Error("binary upgrade failed, this process keeps serving", "err", err)
		return childProcess{}
	}
	s.log.Info("binary upgrade started", "pid", child.pid, "program", s.process.program)
	return child
}

// startChild starts this program's file as it is on disk now, with the same arguments and the listeners.
func (s *Server) startChild() (childProcess, error) {
	if err := checkNotPID1(os.Getpid()); err != nil {
		return childProcess{}, err
	}
	if s.files.snapshot != nil {
		s.files.snapshot.save() // for the new process to read
	}
	s.usage.Save(s.log) // so that its reports have this, too
	ready, childReady, err := os.Pipe()
	if err != nil {
		return childProcess{}, err
	}
	defer childReady.Close() // so that the pipe ends with the new process
	cmd := exec.Command(s.process.program, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	var names []string
	passOn := func(name string, socket net.Listener) error {
		file, err := duplicateSocket(socket)
		if err != nil {
			return fmt.Errorf("pass on the %s listener: %w", name, err)
		}
		names, cmd.ExtraFiles = append(names, name), append(cmd.ExtraFiles, file)
		return nil
	}
	defer func() {
		for _, file := range cmd.ExtraFiles[:len(names)] {
			file.Close()
		}
	}()
	for _, l := range s.listeners.all() {
		err = errors.Join(err, passOn(l.name, l.socket))
	}
	for _, socket := range s.listeners.kvEvents {
		err = errors.Join(err, passOn("kv_events", socket))
	}
	if err != nil {
		ready.Close()
		return childProcess{}, err
	}
	cmd.ExtraFiles = append(cmd.ExtraFiles, childReady)
	state, err := json.Marshal(upgradeState{
		ReadyFD: firstInheritedFD + len(names),
		Listen:  s.started.Listen, Admin: s.started.Admin, KVEvents: s.started.KVEvents,
		Instance: s.instance, SystemdSocket: s.process.inherited.SystemdSocket,
	})
	if err != nil {
		ready.Close()
		return childProcess{}, err
	}
	cmd.Env = append(os.Environ(), upgradeVariable+"="+string(state),
		"LISTEN_FDS="+strconv.Itoa(len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	if err := cmd.Start(); err != nil {
		ready.Close()
		return childProcess{}, err
	}
	child := newChildProcess(cmd, ready)
	s.listeners.serving.Go(func() { child.serves <- awaitReadyOrKill(cmd, ready) })
	return child, nil
}

// newChildProcess returns the record of a started process that writes to readyPipe once it serves.
func newChildProcess(started *exec.Cmd, readyPipe *os.File) childProcess {
	readyPipe.SetReadDeadline(time.Now().Add(upgradeTimeout))
	stop := func(s os.Signal) {
		started.Process.Signal(s)
		readyPipe.SetReadDeadline(time.Now().Add(childExitTimeout))
	}
	return childProcess{pid: started.Process.Pid, serves: make(chan error, 1), stop: stop}
}

// checkNotPID1 returns why a process with that ID cannot start a binary upgrade, or nil.
func checkNotPID1(pid int) error {
	if pid == 1 {
		return errors.New("this is process 1 of its container, which ends with it: start another container and stop this one with SIGTERM")
	}
	return nil
}

// awaitReadyOrKill blocks until the new process serves. One that does not is killed.
func awaitReadyOrKill(cmd *exec.Cmd, readyPipe *os.File) error {
	defer readyPipe.Close()
	_, err := io.ReadFull(readyPipe, make([]byte, 1))
	if err == nil {
		return nil
	}
	cmd.Process.Kill()
	cmd.Wait()
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the new process ended before it served: %v", cmd.ProcessState)
	}
	return fmt.Errorf("the new process did not serve within %v", upgradeTimeout)
}

// programPath returns the path that this process was started by: what is there later may be another version.
func programPath() (string, error) {
	if path, err := exec.LookPath(os.Args[0]); err == nil {
		return filepath.Abs(path)
	}
	return os.Executable()
}
