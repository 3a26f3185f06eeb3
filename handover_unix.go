//go:build unix

package main

import (
	"net"
	"os"
	"os/signal"
	"syscall"
)

// notifyHandOver has the signal that asks for a hand-over sent to c.
func notifyHandOver(c chan<- os.Signal) { signal.Notify(c, syscall.SIGUSR2) }

// duplicate makes a descriptor of l's socket for another process. It stays
// non-blocking, which the File method of listeners would not leave it: the two
// processes share that.
func duplicate(l net.Listener) (*os.File, error) {
	raw, err := l.(syscall.Conn).SyscallConn()
	if err != nil {
		return nil, err
	}
	var file *os.File
	var failed error
	err = raw.Control(func(fd uintptr) {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		var dup int
		if dup, failed = syscall.Dup(int(fd)); failed == nil {
			syscall.CloseOnExec(dup)
			file = os.NewFile(uintptr(dup), "listener")
		}
	})
	if err == nil {
		err = failed
	}
	return file, err
}
