//go:build unix

package server

import (
	"net"
	"os"
	"os/signal"
	"syscall"
)

// fileDescriptorLimit returns how many files this process may have open, 0 if that is
// unknown. Go has raised it to the hard limit.
func fileDescriptorLimit() uint64 {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return uint64(limit.Cur)
}

// relayUpgradeSignal relays SIGUSR2, which asks for a binary upgrade, to c.
func relayUpgradeSignal(c chan<- os.Signal) { signal.Notify(c, syscall.SIGUSR2) }

// duplicateSocket returns a descriptor of l's socket for another process. It stays non-blocking, which the File
// method of listeners would not leave it: the two processes share that flag.
func duplicateSocket(l net.Listener) (*os.File, error) {
	var file *os.File
	err := controlSocket(l, func(fd int) error {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		dup, err := syscall.Dup(fd)
		if err == nil {
			syscall.CloseOnExec(dup)
			file = os.NewFile(uintptr(dup), "listener")
		}
		return err
	})
	return file, err
}
