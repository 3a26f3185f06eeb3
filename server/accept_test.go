package server

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
)

// failingListener fails so many times before it accepts.
type failingListener struct {
	net.Listener
	errs []error
}

func (l *failingListener) Accept() (net.Conn, error) {
	if len(l.errs) == 0 {
		return l.Listener.Accept()
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
}

func TestServeContinuesAfterAcceptError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	var log syncBuffer
	resources := &resourceLog{log: slog.New(slog.NewTextHandler(&log, nil))}
	failing := &failingListener{l, []error{syscall.EMFILE, syscall.ENFILE, syscall.EPROTO, syscall.ENOBUFS, syscall.EPERM}}
	server := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(retryingListener{failing, resources.acceptFailed}) }()
	client := &http.Client{Transport: &http.Transport{}}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	client.CloseIdleConnections()
	server.Close()
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("the server ended with %v", err)
	}
	text := log.String()
	if strings.Count(text, "level=ERROR msg=\"out of file descriptors\"") != 1 || strings.Count(text, "level=ERROR msg=\"accept failed\"") != 1 {
		t.Errorf("the log:\n%s", text)
	}
}
