package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

const (
	// firstInherited is the descriptor at which sockets begin that a process is
	// given, as systemd has it (sd_listen_fds).
	firstInherited = 3
	// readyVariable names the descriptor of a pipe: a byte into it tells the process
	// before that this one serves, and its end without that, that it never will.
	readyVariable = "LISTEN_READY_FD"
	// settingsVariable has listen and admin as they were when the sockets were opened
	// or inherited, of a hand-over.
	settingsVariable = "LISTEN_SETTINGS"
	// instanceVariable has the id by which requests that come back are found, of a
	// hand-over: who asks at the listener's address reaches either process.
	instanceVariable = "LISTEN_INSTANCE"
	// keptVariable is set in a hand-over where systemd keeps the public socket open.
	keptVariable = "LISTEN_KEPT"
)

// inherited is what a process was given at its start: by systemd's socket
// activation, or by a warmroute that hands over to it. All may be nil.
type inherited struct {
	public, admin net.Listener
	ready         *os.File // of a hand-over
	settings      []string // listen, and admin if there was one, of the process before
	instance      string   // of the process before
	kept          bool     // systemd keeps the socket of public open when this process ends
}

// inherit takes the sockets that the environment tells of, and the variables out
// of it. They go by their names, public and admin, else by their order.
func inherit() (*inherited, error) {
	variable := func(name string) string {
		defer os.Unsetenv(name)
		return os.Getenv(name)
	}
	pid, count, names, ready := variable("LISTEN_PID"), variable("LISTEN_FDS"), variable("LISTEN_FDNAMES"), variable(readyVariable)
	in := &inherited{settings: strings.Fields(variable(settingsVariable)), instance: variable(instanceVariable)}
	kept := variable(keptVariable) != ""
	if ready == "" && pid != strconv.Itoa(os.Getpid()) { // for another process, if at all
		return in, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > 2 {
		return nil, fmt.Errorf("LISTEN_FDS is %q: one socket can be given for listen and one for admin", count)
	}
	var listeners []net.Listener
	for fd := firstInherited; fd < firstInherited+n; fd++ {
		l, err := inheritListener(fd)
		if err != nil {
			return nil, err
		}
		listeners = append(listeners, l)
	}
	in.assign(listeners, strings.Split(names, ":"))
	in.kept = in.public != nil && (kept || ready == "")
	if ready == "" {
		return in, nil
	}
	fd, err := strconv.Atoi(ready)
	if err != nil {
		return nil, fmt.Errorf("%s is %q and no descriptor", readyVariable, ready)
	}
	in.ready = os.NewFile(uintptr(fd), "ready")
	return in, nil
}

func inheritListener(fd int) (net.Listener, error) {
	file := os.NewFile(uintptr(fd), "listener")
	defer file.Close() // the listener has a descriptor of its own
	l, err := net.FileListener(file)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d, of which LISTEN_FDS tells, is no socket to listen on: %w", fd, err)
	}
	takeConnections(l) // a process before may have ended after ignoreConnections
	return l, nil
}

// assign gives those that have a name of ours their place, and the rest what is
// left in order.
func (in *inherited) assign(listeners []net.Listener, names []string) {
	var others []net.Listener
	for i, l := range listeners {
		switch {
		case i < len(names) && names[i] == "public" && in.public == nil:
			in.public = l
		case i < len(names) && names[i] == "admin" && in.admin == nil:
			in.admin = l
		default:
			others = append(others, l)
		}
	}
	for _, l := range others {
		if in.public == nil {
			in.public = l
		} else {
			in.admin = l
		}
	}
}

// closeOthers closes the sockets of a hand-over whose settings are others by now.
// The addresses alone would not tell: those of sockets from systemd need not be
// what the settings say.
func (in *inherited) closeOthers(c *Config) {
	if in.public != nil && len(in.settings) > 0 && in.settings[0] != c.Listen {
		in.public.Close()
		in.public, in.kept = nil, false
	}
	if in.admin != nil && len(in.settings) > 1 && in.settings[1] != c.Admin {
		in.admin.Close()
		in.admin = nil
	}
}

// listen opens the listeners that were not inherited, so that a port already
// taken is an error before anything runs. admin is nil when the configuration
// has none.
func (in *inherited) listen(c *Config) (public, admin net.Listener, err error) {
	in.closeOthers(c)
	if public = in.public; public == nil {
		if public, err = listenTCP(c.Listen); err != nil {
			return nil, nil, cannotListen("listen", c.Listen, err)
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
		return nil, nil, cannotListen("admin", c.Admin, err)
	}
	return public, admin, nil
}

// serves tells the process before, if there is one, that this one serves.
func (in *inherited) serves() error {
	if in.ready == nil {
		return nil
	}
	_, err := in.ready.Write([]byte{1})
	return cmp.Or(err, in.ready.Close())
}

// listenTCP listens without Multipath TCP, which is Go's default and whose sockets
// take no filter (ignoreConnections).
func listenTCP(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), "tcp", address)
}
