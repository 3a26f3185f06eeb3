//go:build unix

package e2e

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// hearState listens to the proxy's state, and returns when it has come once.
func (p *program) hearState() *bufio.Reader {
	p.t.Helper()
	client := &http.Client{Transport: &http.Transport{}}
	resp, err := client.Get(p.admin + "/api/events")
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { resp.Body.Close(); client.CloseIdleConnections() })
	from := bufio.NewReader(resp.Body)
	if line, err := from.ReadString('\n'); line != "event: state\n" {
		p.t.Fatalf("got %q, %v", line, err)
	}
	return from
}

// Whoever looks at the page does not hold up the end, and sees it come.
func TestShutdownWithOpenPage(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*program){
		"stopped":  func(p *program) { p.signal(syscall.SIGTERM) },
		"upgraded": func(p *program) { p.upgrade() },
	} {
		t.Run(name, func(t *testing.T) {
			fleet := startSimFleet(t, 1, 200_000)
			p := startProgram(t, "--config", fleet.configFile(t, "timeouts: {serve_after_term: 10ms}").path)
			from := p.hearState()
			end(p)
			rest, err := io.ReadAll(from)
			if err != nil || !strings.HasSuffix(string(rest), "event: end\ndata: {}\n\n") {
				t.Errorf("the events ended with %q, %v", rest[max(0, len(rest)-60):], err)
			}
			if status := p.exit(); status != 0 {
				t.Errorf("ended with %d", status)
			}
		})
	}
}
