package main

import (
	"net"
	"os"
)

// notifySystemd tells systemd, if it started this process with Type=notify, how
// the service is, in the words of sd_notify. Nothing depends on it.
func notifySystemd(state string) error {
	address := os.Getenv("NOTIFY_SOCKET")
	if address == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte(state))
	return err
}

func (s *service) tellSystemd(state string) {
	if err := notifySystemd(state); err != nil {
		s.log.Warn("systemd could not be told", "state", state, "reason", err.Error())
	}
}

// reloadTelling reloads, and tells systemd that it does and what came of it. Before
// the service is ready it tells nothing: it would be word that it is.
func (s *service) reloadTelling(read reading, ready bool) {
	if !ready {
		s.reload(read.config, read.err)
		return
	}
	s.tellSystemd("RELOADING=1\nMONOTONIC_USEC=" + monotonicMicroseconds())
	status := "serving"
	if !s.reload(read.config, read.err) {
		status = "serving with the configuration from before; the log says what is wrong with the new one"
	}
	s.tellSystemd("READY=1\nSTATUS=" + status)
}
