package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// simProcess is a simulated replica in a process of its own, which signals end as
// they end vLLM.
type simProcess struct {
	t       *testing.T
	address string
	args    []string
	cmd     *exec.Cmd
}

func startSimProcess(t *testing.T, args ...string) *simProcess {
	s := &simProcess{t: t, address: "127.0.0.1:0", args: args}
	s.start()
	t.Cleanup(func() {
		s.cmd.Process.Kill()
		s.cmd.Wait()
	})
	return s
}

// start returns when the replica listens, at the address that it had before.
func (s *simProcess) start() {
	s.t.Helper()
	log := &syncBuffer{}
	s.cmd = exec.Command(binary, append([]string{"sim", "--listen", s.address}, s.args...)...)
	s.cmd.Stderr = log
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, after, said := strings.Cut(log.String(), "base URL http://"); said {
			s.address, _, _ = strings.Cut(after, "/v1")
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("the replica does not listen: %s", log.String())
		}
	}
}

// stop is SIGTERM, and returns when the process has ended.
func (s *simProcess) stop() {
	s.t.Helper()
	s.cmd.Process.Signal(syscall.SIGTERM)
	s.cmd.Wait()
}

// TestRestartOfOnlyReplica holds for whole
// answers, which are committed at their end.
func TestRestartOfOnlyReplica(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{"it aborts": nil, "it drains": {"--shutdown-timeout", "10"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			replica := startSimProcess(t, append(args, "--speed", "2")...)
			file := (&simFleet{}).configFile(t, "backends: [http://"+replica.address+"]")
			p := startProgram(t, "--config", file.path)
			clients := &crowd{t: t}
			transport := &http.Transport{}
			for i := range 12 {
				clients.clients.Go(func() {
					for n := 0; !clients.over.Load(); n++ {
						p.askWhole(transport, fmt.Sprintf("client %d, request %d", i, n))
						clients.answered.Add(1)
					}
				})
			}
			for range 2 {
				clients.more(20)
				p.eventually("requests are in flight", func() bool { return metricSum(t, p.admin, "warmroute_backend_in_flight") > 0 })
				replica.stop()
				time.Sleep(3 * time.Second) // the time that a model takes to load; more than words are kept back for
				replica.start()
			}
			clients.more(20)
			clients.leave()
			transport.CloseIdleConnections()
		})
	}
}

// askWhole fails the test unless a whole answer comes.
func (p *program) askWhole(transport *http.Transport, prompt string) {
	body := fmt.Sprintf(`{"model":"sim","max_tokens":60,"ignore_eos":true,"messages":[{"role":"user","content":%q}]}`, prompt)
	client := &http.Client{Transport: transport}
	resp, err := client.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		p.t.Errorf("%s: %v", prompt, err)
		return
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || strings.Contains(string(answer), `"abort"`) {
		p.t.Errorf("%s: %d, %v, %s", prompt, resp.StatusCode, err, answer)
	}
}
