package server

import "github.com/coreos/go-systemd/v22/daemon"

// notifySystemd tells systemd the service's state, if it started this process with
// Type=notify. Nothing depends on it.
func (s *Server) notifySystemd(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		s.log.Warn("sd_notify failed", "state", state, "err", err)
	}
}

// notifySystemdAndPredecessor tells systemd and a predecessor that this process serves.
func (s *Server) notifySystemdAndPredecessor() {
	s.notifySystemd(daemon.SdNotifyReady)
	if err := s.process.inherited.notifyPredecessor(); err != nil {
		s.log.Warn("predecessor exited during the binary upgrade", "err", err)
	}
}

// applyReloadAndNotify reloads, and tells systemd so and the result. Before the service is
// ready it tells systemd nothing: READY=1 would be premature.
func (s *Server) applyReloadAndNotify(loaded loadResult, serviceReady bool) {
	if !serviceReady {
		s.applyReload(loaded.config, loaded.err)
		return
	}
	s.notifySystemd(daemon.SdNotifyReloading + "\n" + daemon.SdNotifyMonotonicUsec())
	status := "serving"
	if !s.applyReload(loaded.config, loaded.err) {
		status = "serving with the previous config: reload failed, see the log"
	}
	s.notifySystemd(daemon.SdNotifyReady + "\nSTATUS=" + status)
}
