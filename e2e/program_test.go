// Package e2e tests the program as its users have it: as a process, with its configuration, its clients,
// replicas, and what else stands around it.
package e2e

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// binary is the program, built by TestMain.
var binary string

// TestMain builds the program once, with the race detector if the tests have it, and
// runs the tests in the repository's root.
func TestMain(m *testing.M) {
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	if err := os.Chdir(".."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "warmroute-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "warmroute")
	args := []string{"build", "-buildvcs=false", "-o", binary} // the corpus of wire_test.go has the version that it is then
	if raceEnabled {
		args = append(args, "-race")
	}
	if output, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, output)
		return 1
	}
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		parallel.Value.Set(strconv.Itoa(max(minParallel, runtime.GOMAXPROCS(0))))
	}
	return m.Run()
}

// runCommand runs a command of the program to its end and returns its exit status and output.
func runCommand(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// program is a warmroute process that serves.
type program struct {
	t          *testing.T
	cmd        *exec.Cmd
	log        *syncBuffer
	url, admin string
	ended      chan struct{}
	status     int // once ended is closed
}

// startProgram returns when the proxy serves. A test that leaves it running has
// it killed.
func startProgram(t *testing.T, args ...string) *program {
	t.Helper()
	return startProgramWithEnv(t, nil, args...)
}

// startProgramWithEnv adds variables to the environment of the program alone, so that
// such tests can run in parallel.
func startProgramWithEnv(t *testing.T, env []string, args ...string) *program {
	t.Helper()
	cmd := exec.Command(binary, append([]string{"serve"}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	return startCommand(t, cmd)
}

func startCommand(t *testing.T, cmd *exec.Cmd) *program {
	t.Helper()
	p := launch(t, cmd)
	p.serves()
	return p
}

// launch returns at once.
func launch(t *testing.T, cmd *exec.Cmd) *program {
	t.Helper()
	p := &program{t: t, cmd: cmd, log: &syncBuffer{}, ended: make(chan struct{})}
	// A pipe and no Buffer: the process after a binary upgrade writes to it as well.
	logged, log, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	drained := make(chan struct{})
	go p.copyLog(logged, drained)
	go func() {
		state, _ := cmd.Process.Wait()
		p.status = state.ExitCode()
		_, _ = log.Write([]byte{endOfLog})
		_ = log.Close()
		<-drained
		close(p.ended)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("log of process %d:\n%s", cmd.Process.Pid, p.log.String())
		}
	})
	return p
}

// endOfLog follows what a process has logged. No log has this byte.
const endOfLog = 0

// copyLog copies a log until every process that writes to it has ended, and closes drained when it has read endOfLog.
func (p *program) copyLog(logged io.ReadCloser, drained chan struct{}) {
	defer logged.Close()
	chunk := make([]byte, 64<<10)
	for {
		n, err := logged.Read(chunk)
		before, after, found := bytes.Cut(chunk[:n], []byte{endOfLog})
		p.log.Write(before)
		p.log.Write(after) // of the process after a binary upgrade
		if found {
			close(drained)
		}
		if err != nil {
			return
		}
	}
}

// serves waits until the proxy does.
func (p *program) serves() {
	p.t.Helper()
	p.url = "http://" + p.awaitLog(`msg=listening public=(\S+)`)
	if strings.Contains(p.log.String(), " tls=true ") {
		p.url = strings.Replace(p.url, "http", "https", 1)
	}
	p.admin = "http://" + p.awaitLog(`msg=listening admin=(\S+)`)
	p.eventually("ready", func() bool { return metricSum(p.t, p.admin, "warmroute_backend_ready") > 0 })
}

// awaitLog waits for what matches and returns its first group, or all of it.
func (p *program) awaitLog(expression string) string {
	p.t.Helper()
	pattern := regexp.MustCompile(expression)
	var found []string
	p.eventually("the log says "+expression, func() bool {
		found = pattern.FindStringSubmatch(p.log.String())
		return found != nil
	})
	return found[len(found)-1]
}

func (p *program) eventually(what string, is func() bool) {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("not within a minute: %s; the log:\n%s", what, p.log.String())
		}
	}
}

func (p *program) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// exit waits for the process to end and returns its status.
func (p *program) exit() int {
	p.t.Helper()
	p.eventually("the process ends", func() bool {
		select {
		case <-p.ended:
			return true
		default:
			return false
		}
	})
	return p.status
}

// configFile is a configuration on disk that names the fleet.
type configFile struct {
	t     *testing.T
	path  string
	fleet *simFleet
}

func (f *simFleet) configFile(t *testing.T, yaml string) *configFile {
	c := &configFile{t: t, path: filepath.Join(t.TempDir(), "warmroute.yaml"), fleet: f}
	c.write(yaml)
	return c
}

// write replaces the file by a rename, as editors do.
func (c *configFile) write(yaml string) {
	c.t.Helper()
	text := "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n" + yaml
	if !strings.Contains(yaml, "backends:") {
		text += "\nbackends: [" + strings.Join(c.fleet.urls, ", ") + "]\n"
	}
	if err := os.WriteFile(c.path+".new", []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	if err := os.Rename(c.path+".new", c.path); err != nil {
		c.t.Fatal(err)
	}
}

// startWithDescriptors starts the proxy with a limit of file descriptors.
func (c *configFile) startWithDescriptors(limit int) *program {
	c.t.Helper()
	return startCommand(c.t, exec.Command("sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" serve --config "$1"`, limit), binary, c.path))
}

// askStream sends one streamed request, and returns an error unless its answer
// comes whole. tokens is the answer's length; begun is called at its first event.
func askStream(client *http.Client, url, prompt string, tokens int, begun func()) error {
	body := fmt.Appendf(nil, `{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`,
		tokens, prompt)
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	var last string
	for events := 0; lines.Scan(); {
		if line := lines.Text(); line != "" {
			last = line
			if events++; events == 1 && begun != nil {
				begun()
			}
			if strings.Contains(line, `"error"`) {
				return fmt.Errorf("status %d, %s", resp.StatusCode, line)
			}
		}
	}
	if lines.Err() != nil || resp.StatusCode != http.StatusOK || last != "data: [DONE]" {
		return fmt.Errorf("status %d, last line %q, %w", resp.StatusCode, last, lines.Err())
	}
	return nil
}

// crowd is clients that ask and ask again until they are told to leave.
type crowd struct {
	t        *testing.T
	answered atomic.Int64
	over     atomic.Bool
	clients  sync.WaitGroup
}

// startCrowd has half of the clients keep their connections, and half connect
// anew for each request.
func (p *program) startCrowd(n int, transport *http.Transport) *crowd {
	c := &crowd{t: p.t}
	for i := range n {
		c.clients.Go(func() {
			own := transport.Clone()
			own.DisableKeepAlives = i%2 == 0
			client := &http.Client{Transport: own}
			defer client.CloseIdleConnections()
			for k := 0; !c.over.Load(); k++ {
				if err := askStream(client, p.url, fmt.Sprintf("client %d, request %d", i, k), 8, nil); err != nil {
					c.t.Errorf("client %d, request %d: %v", i, k, err)
				}
				c.answered.Add(1)
			}
		})
	}
	return c
}

// more waits until so many more requests were answered.
func (c *crowd) more(n int64) {
	c.t.Helper()
	from := c.answered.Load()
	for end := time.Now().Add(time.Minute); c.answered.Load() < from+n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%d requests answered within a minute, not %d", c.answered.Load()-from, n)
		}
	}
}

func (c *crowd) leave() {
	c.over.Store(true)
	c.clients.Wait()
}
