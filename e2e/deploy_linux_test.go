package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/miekg/dns"
)

// startNameServer starts a DNS server on loopback that responds with addresses, whatever the name is.
func startNameServer(t *testing.T) (address string, addresses *atomic.Pointer[[]string]) {
	t.Helper()
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addresses = new(atomic.Pointer[[]string])
	s := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		response := new(dns.Msg).SetReply(query)
		for _, a := range *addresses.Load() {
			if query.Question[0].Qtype == dns.TypeA {
				header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 600}
				response.Answer = append(response.Answer, &dns.A{Hdr: header, A: net.ParseIP(a)})
			}
		}
		_ = w.WriteMsg(response)
	})}
	stopped := make(chan error, 1)
	started := make(chan struct{})
	s.NotifyStartedFunc = func() { close(started) }
	go func() { stopped <- s.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		if err := errors.Join(s.Shutdown(), <-stopped); err != nil {
			t.Error(err)
		}
	})
	return packets.LocalAddr().String(), addresses
}

// listBackends returns what `warmroute backends list` prints, a line for each backend.
func (p *program) listBackends(args ...string) []string {
	p.t.Helper()
	status, stdout, stderr := runCommand(p.t, append([]string{"backends", "list", "--admin", p.admin}, args...)...)
	if status != 0 {
		p.t.Fatalf("backends list: status %d, %s", status, stderr)
	}
	var rows []string
	for _, line := range strings.Split(stdout, "\n")[1:] {
		if strings.Contains(line, "http://") {
			rows = append(rows, line)
		}
	}
	return rows
}

func (p *program) awaitBackends(ready int, args ...string) {
	p.t.Helper()
	p.eventually(fmt.Sprint(ready, " backends, all ready"), func() bool {
		rows := p.listBackends(args...)
		return len(rows) == ready && !slices.ContainsFunc(rows, func(row string) bool { return !strings.Contains(row, " ready ") })
	})
}

// TestComposeScale runs the proxy of docs/deploy/compose/scale.yaml while its service is scaled 1 → 4 → 2.
func TestComposeScale(t *testing.T) {
	t.Parallel()
	address, addresses := startNameServer(t)
	c := &composed{t: t, project: composeFile(t, "docs/deploy/compose/scale.yaml"),
		mapped: map[string]string{"/var/lib/warmroute": t.TempDir()}}
	port := "0"
	var replicas []*program
	var ips []string
	scale := func(n int) {
		for i := len(replicas); i < n; i++ {
			ip := fmt.Sprintf("127.0.4.%d", i+1)
			p := launch(t, exec.Command(binary, "sim", "--listen", ip+":"+port, "--speed", "20", "--shutdown-timeout", "60"))
			_, port, _ = net.SplitHostPort(p.awaitLog(`base URL http://(\S+)/v1`))
			replicas, ips = append(replicas, p), append(ips, ip)
		}
		current := slices.Clone(ips[:n])
		addresses.Store(&current)
		for _, p := range replicas[n:] { // Docker removes a container from its DNS when it stops it
			p.signal(syscall.SIGTERM)
		}
	}
	scale(1)
	c.mapped["vllm:8000"] = "vllm:" + port
	p := startCommand(t, c.command("warmroute", c.project.Services["warmroute"].Command, "WARMROUTE_DNS_SERVER="+address,
		"WARMROUTE_LISTEN=127.0.0.1:0", "WARMROUTE_ADMIN=127.0.0.1:0", "WARMROUTE_ADMIN_TOKEN_FILE="))
	p.awaitBackends(1)
	clients := p.startCrowd(8, &http.Transport{})
	clients.more(50)
	scale(4)
	p.awaitBackends(4)
	clients.more(50)
	scale(2)
	p.awaitBackends(2)
	clients.more(50)
	clients.leave()
}

// TestComposeSideChannel runs the script by which replicas of the profile disaggregation tell vLLM their address.
func TestComposeSideChannel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeScript(t, dir, "hostname", "[ $1 = -i ] && echo 172.18.0.5")
	writeScript(t, dir, "vllm", `echo "$VLLM_NIXL_SIDE_CHANNEL_HOST $*"`)
	project := composeProject(t, "disaggregation")
	for _, service := range composeProfiles()[3].replicas {
		argv := append(slices.Clone(project.Services[service].Entrypoint), "the-model", "--option")
		cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		if output, err := cmd.Output(); err != nil || string(output) != "172.18.0.5 serve the-model --option\n" {
			t.Errorf("%s runs %q, %v", service, output, err)
		}
	}
}

// TestComposeScaleGPUs runs the script that has each container of docs/deploy/compose/scale.yaml take a free GPU.
func TestComposeScaleGPUs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeScript(t, dir, "nvidia-smi", "echo 0; echo 1")
	writeScript(t, dir, "vllm", `echo "$CUDA_VISIBLE_DEVICES $*"; read -r`)
	entrypoint := composeFile(t, "docs/deploy/compose/scale.yaml").Services["vllm"].Entrypoint
	start := func() (line string, stop func()) {
		cmd := exec.CommandContext(t.Context(), entrypoint[0], entrypoint[1], strings.ReplaceAll(entrypoint[2], "/gpus/", dir+"/"), entrypoint[3],
			"the-model")
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = fmt.Fscanf(stdout, "%s serve the-model\n", &line) // nothing without a free GPU
		return line, func() { stdin.Close(); _ = cmd.Wait() }
	}
	first, stopFirst := start()
	second, stopSecond := start()
	defer stopSecond()
	none, stopNone := start()
	defer stopNone()
	if first != "0" || second != "1" || none != "" {
		t.Errorf("the containers use the GPUs %q, %q, %q", first, second, none)
	}
	stopFirst()
	again, stopAgain := start()
	defer stopAgain()
	if again != "0" {
		t.Errorf("the GPU of a container that has stopped is not used again, but %q", again)
	}
}

// writeScript writes a shell script that is found by its name in PATH.
func writeScript(t *testing.T, dir, name, script string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/bash\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}

// TestSlurmReplica runs docs/deploy/slurm/replica.sbatch twice, with a simulated replica in place of vLLM.
func TestSlurmReplica(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	token := writeFile(t, "the-token-of-operators-0123456789")
	p := launch(t, exec.Command(binary, "serve", "--config", writeFile(t,
		"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nadmin_token_file: "+token+"\nstate_file: "+dir+"/state\n")))
	p.admin = "http://" + p.awaitLog(`msg=listening admin=(\S+)`)
	writeScript(t, dir, "warmroute", `exec `+binary+` "$@"`)
	writeScript(t, dir, "vllm", `exec `+binary+` sim --listen 127.0.5.$SLURM_ARRAY_TASK_ID:$4`)
	writeScript(t, dir, "hostname", `echo 127.0.5.$SLURM_ARRAY_TASK_ID`)
	for name, content := range map[string]string{"admin-url": p.admin, "admin-token": "the-token-of-operators-0123456789"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var jobs []*program
	for task := range 2 {
		cmd := exec.Command("bash", "docs/deploy/slurm/replica.sbatch")
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "WARMROUTE_DIR="+dir,
			fmt.Sprintf("SLURM_JOB_ID=%d", 4711+task), fmt.Sprintf("SLURM_ARRAY_TASK_ID=%d", task+1))
		jobs = append(jobs, launch(t, cmd))
	}
	p.awaitBackends(2, "--token-file", token)
	jobs[0].signal(syscall.SIGTERM)
	if status := jobs[0].exit(); status != 0 {
		t.Errorf("the job ended with status %d: %s", status, jobs[0].log.String())
	}
	p.awaitBackends(1, "--token-file", token)
	if rows := p.listBackends("--token-file", token); !strings.HasPrefix(rows[0], "vllm-4712 ") {
		t.Errorf("got %q", rows)
	}
	jobs[1].signal(syscall.SIGTERM)
	jobs[1].exit()
	p.awaitBackends(0, "--token-file", token)
}
