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
