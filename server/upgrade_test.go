//go:build unix

package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"warmroute/lab/policies"
)

// newSuccessor returns a Server that takes over from a process with the other end of
// the pipe, and has checked all its backends.
func newSuccessor(t *testing.T, p process) (s *Server, ready *os.File) {
	t.Helper()
	ready, childReady, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ready.Close() })
	p.inherited = &inherited{ready: childReady}
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: \"\"", startSimFleet(t, 1, 200_000).urls[0])
	if s, err = New(Options{Config: c, Policies: policies.All(), Log: slog.New(slog.DiscardHandler), process: p}); err != nil {
		t.Fatal(err)
	}
	s.startupChecks = newStartupChecks(nil)
	return s, ready
}

func TestStopDuringStartupChecks(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	stop()
	for range 10 { // Go chooses at random
		s, heard := newSuccessor(t, process{})
		if err := s.Run(ctx); err != nil {
			t.Fatal(err)
		}
		s.process.inherited.ready.Close()
		if said, _ := io.ReadAll(heard); len(said) > 0 {
			t.Error("it said that it serves")
		}
		if _, err := s.listeners.public.socket.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the listener: %v", err)
		}
	}
}

func TestServeAfterPredecessorDied(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	s, heard := newSuccessor(t, process{})
	heard.Close()
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	resp, err := http.Get(s.publicURL() + "/livez")
	if err != nil {
		t.Error(err)
	} else {
		resp.Body.Close()
	}
	http.DefaultClient.CloseIdleConnections()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The byte that says so may lie unread in the pipe when the service is stopped.
func TestStopOfChildThatServes(t *testing.T) {
	heard, told, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	cmd := exec.Command("sh", "-c", "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done")
	ready, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready.Read(make([]byte, 1))
	next := newChildProcess(cmd, heard)
	told.Write([]byte{1})
	next.stop(syscall.SIGTERM)
	if err := awaitReadyOrKill(cmd, heard); err != nil {
		t.Error(err)
	}
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 7 {
		t.Errorf("status %d", status)
	}
}

func TestProcess1CannotUpgrade(t *testing.T) {
	if err := checkNotPID1(1); err == nil || !strings.Contains(err.Error(), "container") {
		t.Error(err)
	}
	if err := checkNotPID1(2); err != nil {
		t.Error(err)
	}
}
