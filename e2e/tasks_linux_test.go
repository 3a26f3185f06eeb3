package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// A taskStep is a block of commands of docs/tasks.md. A block that is marked "sh run" is run once, one that is marked
// "sh check" until it prints what the next block of text has.
type taskStep struct {
	task, commands, output string
	repeat                 bool
}

// readSteps returns the steps of the page in order.
func readSteps(page string) (steps []taskStep) {
	task := ""
	block := regexp.MustCompile("(?ms)^## ([^\n]+)$|^```([a-z ]+)\n(.*?)^```$")
	for _, found := range block.FindAllStringSubmatch(page, -1) {
		switch found[2] {
		case "":
			task = found[1]
		case "sh run", "sh check":
			steps = append(steps, taskStep{task: task, commands: found[3], repeat: found[2] == "sh check"})
		case "text":
			steps[len(steps)-1].output = found[3]
		}
	}
	return steps
}

// isIn reports whether each line of the output that the page has is the beginning, the end or a part of one that was
// printed, in order. Numbers and the width of columns may differ.
func (s *taskStep) isIn(printed string) bool {
	var pattern strings.Builder
	pattern.WriteString("(?s)")
	for line := range strings.Lines(s.output) {
		line = regexp.QuoteMeta(strings.TrimSpace(line))
		line = regexp.MustCompile(`\d+`).ReplaceAllString(line, `\d+`)
		pattern.WriteString(".*" + regexp.MustCompile(`\s+`).ReplaceAllString(line, `\s+`))
	}
	return regexp.MustCompile(pattern.String()).MatchString(printed)
}

// shell is a bash that runs one block after another.
type shell struct {
	t      *testing.T
	stdin  io.Writer
	stdout *bufio.Reader
	blocks int
}

// run returns what the commands have printed, and their exit status.
func (s *shell) run(commands string) (printed, status string) {
	s.t.Helper()
	s.blocks++
	end := fmt.Sprintf("the end of block %d: ", s.blocks)
	if _, err := fmt.Fprintf(s.stdin, "%s\necho; echo '%s'$?\n", commands, end); err != nil {
		s.t.Fatal(err)
	}
	var all bytes.Buffer
	for {
		line, err := s.stdout.ReadString('\n')
		if err != nil {
			s.t.Fatalf("%v after %s", err, all.String())
		}
		if status, ended := strings.CutPrefix(line, end); ended {
			return all.String(), strings.TrimSpace(status)
		}
		all.WriteString(line)
	}
}

// TestTasks runs the commands of docs/tasks.md in order, with simulated replicas.
func TestTasks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/tasks.md")
	if err != nil {
		t.Fatal(err)
	}
	addresses := []string{"127.0.0.1:8080", freeAddress(t), "127.0.0.1:9090", freeAddress(t), "IP:127.0.0.1", "IP:" + tasksHost}
	restart := "ssh() { case $1 in "
	for i := range 3 {
		url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 100_000, Speed: 20}}, "127.0.0.1:0")
		addresses = append(addresses, fmt.Sprintf("10.0.0.%d:8000", 5+i), strings.TrimPrefix(url, "http://"))
		restart += fmt.Sprintf("gpu-%d) curl -s %s/sim/fault -d '{\"kind\":\"restart\"}';; ", i, url)
	}
	there := strings.NewReplacer(addresses...)
	s := startShell(t, []string{"WARMROUTE_LISTEN=" + addresses[1], "WARMROUTE_ADMIN=" + addresses[3]})
	s.run(restart + "esac; }")
	for _, step := range readSteps(string(page)) {
		step.output = strings.ReplaceAll(there.Replace(step.output), "listen :8080", "listen "+addresses[1])
		deadline := time.Now().Add(30 * time.Second)
		printed, status := s.run(there.Replace(step.commands))
		for ; step.repeat && !step.isIn(printed) && time.Now().Before(deadline); printed, status = s.run(there.Replace(step.commands)) {
			time.Sleep(50 * time.Millisecond)
		}
		if !step.repeat && status != "0" || !step.isIn(printed) {
			log, _ := s.run("tail -5 serve.log")
			t.Fatalf("%s: status %s, the commands\n%s\nprinted\n%s\nwant\n%s\nlog\n%s", step.task, status, step.commands, printed, step.output, log)
		}
	}
}

// startShell starts a bash in a new folder, where the program is on the path.
func startShell(t *testing.T, env []string) *shell {
	t.Helper()
	bin, dir := t.TempDir(), t.TempDir()
	program, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "warmroute"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bash")
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), env...), "PATH="+bin+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the process after a binary upgrade is in the group as well
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
		stdout.Close()
	})
	return &shell{t: t, stdin: stdin, stdout: bufio.NewReader(stdout)}
}

// tasksHost is an address of this host that no other test has: what is free stays free.
const tasksHost = "127.0.5.1"

// freeAddress returns an address of tasksHost where nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", tasksHost+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
