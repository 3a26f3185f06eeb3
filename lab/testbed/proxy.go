package testbed

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Proxy is a process of warmroute serve. Its methods are not safe for concurrent use.
type Proxy struct {
	URL, Admin string
	Log        string // file
	Config     string // file, written by WriteConfig

	Environment []string // further variables of the process, as NAME=value

	binary   string
	settings string
	listen   string
	client   *http.Client // trusts its certificate
	process  *Process
	upgraded bool // a process in the same group has the listeners
}

// NewProxy returns a proxy, not started, that listens on two ports of 127.0.0.1. configLines
// are further lines of its configuration; configuration and log are written to dir.
func NewProxy(binary, dir string, port, adminPort int, configLines string) *Proxy {
	return &Proxy{
		URL:    fmt.Sprintf("http://127.0.0.1:%d", port),
		Admin:  fmt.Sprintf("http://127.0.0.1:%d", adminPort),
		Log:    filepath.Join(dir, "warmroute.log"),
		Config: filepath.Join(dir, "warmroute.yaml"),
		binary: binary, settings: configLines,
		listen: fmt.Sprintf("127.0.0.1:%d", port), client: http.DefaultClient,
	}
}

// EnableTLS makes the proxy's URL https and its client trust roots. The proxy's settings
// must name the certificate.
func (p *Proxy) EnableTLS(roots *x509.CertPool) {
	p.URL = "https://" + p.listen
	p.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
}

// WriteConfig writes the configuration, with the replicas as backends and further lines.
func (p *Proxy) WriteConfig(replicas []*Replica, configLines ...string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: %q\nadmin: %q\n%s\nbackends:\n", p.listen, strings.TrimPrefix(p.Admin, "http://"), p.settings)
	for _, r := range replicas {
		fmt.Fprintf(&b, "  - {name: %s, url: %s, %s}\n", r.Name, r.URL, r.Settings)
	}
	for _, line := range configLines {
		fmt.Fprintln(&b, line)
	}
	// Atomically: a proxy that watches the file must not read half of it.
	if err := os.WriteFile(p.Config+".new", []byte(b.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(p.Config+".new", p.Config)
}

// StartAndAwait starts the proxy and returns when it is ready.
func (p *Proxy) StartAndAwait(ctx context.Context) error {
	var err error
	if p.process, err = startWithLog(p.Log, p.Environment, p.binary, "serve", "--config", p.Config); err != nil {
		return err
	}
	if err := p.process.awaitOK(ctx, p.client, p.URL+"/readyz", time.Minute); err != nil {
		return fmt.Errorf("%w; its log is %s", err, p.Log)
	}
	return nil
}

// reloadTimeout is generous: the machine may be busy.
const reloadTimeout = 30 * time.Second

// Reload writes the configuration, sends SIGHUP and returns when the proxy has counted a
// reload with the given result, "ok" or "failed".
func (p *Proxy) Reload(ctx context.Context, wantResult string, replicas []*Replica, configLines ...string) error {
	const reloads = "warmroute_config_reloads_total"
	before, err := p.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(p.WriteConfig(replicas, configLines...), p.Signal(syscall.SIGHUP)); err != nil {
		return err
	}
	for end := time.Now().Add(reloadTimeout); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		now, err := p.ReadMetrics(ctx)
		if err != nil {
			return err
		}
		if now.Sum(reloads, "result", wantResult) > before.Sum(reloads, "result", wantResult) {
			return nil
		}
	}
	return fmt.Errorf("no reload with the result %s in %v; the log is %s", wantResult, reloadTimeout, p.Log)
}

// Signal sends a signal to the process.
func (p *Proxy) Signal(s syscall.Signal) error { return p.process.signal(s, p.upgraded) }

// LimitDescriptors sets the process's limit of file descriptors with prlimit(1), and
// returns a function that restores it. It fails after Upgrade.
func (p *Proxy) LimitDescriptors(ctx context.Context, n int) (undo func() error, err error) {
	if p.upgraded {
		return nil, errors.New("unknown process ID after a binary upgrade")
	}
	pid := fmt.Sprint("--pid=", p.process.PID())
	before, err := exec.CommandContext(ctx, "prlimit", pid, "--nofile", "--output=SOFT", "--noheadings", "--raw").Output()
	if err != nil {
		return nil, fmt.Errorf("prlimit: %w", err)
	}
	set := func(soft string) error {
		if out, err := exec.CommandContext(ctx, "prlimit", pid, "--nofile="+soft+":").CombinedOutput(); err != nil {
			return fmt.Errorf("prlimit: %w: %s", err, out)
		}
		return nil
	}
	return func() error { return set(strings.TrimSpace(string(before))) }, set(fmt.Sprint(n))
}

// Upgrade makes the proxy start a binary upgrade (SIGUSR2), and returns
// when the old process has ended with status 0. It can be called once.
func (p *Proxy) Upgrade(ctx context.Context, oldExitTimeout time.Duration) error {
	if err := p.Signal(syscall.SIGUSR2); err != nil {
		return err
	}
	select {
	case <-p.process.ended:
	case <-time.After(oldExitTimeout):
		return fmt.Errorf("the old process still runs %v after SIGUSR2; its log is %s", oldExitTimeout, p.Log)
	case <-ctx.Done():
		return ctx.Err()
	}
	// The new process is not our child, but it is in the same process group.
	p.upgraded = true
	return p.process.err
}

// Terminate sends SIGTERM. It fails if the proxy does not end with status 0 within limit.
func (p *Proxy) Terminate(limit time.Duration) error {
	if p.process == nil {
		return nil
	}
	process := p.process
	p.process = nil
	if !p.upgraded {
		return process.Terminate(limit)
	}
	if err := process.signal(syscall.SIGTERM, true); err != nil {
		return err
	}
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := getStatus(context.Background(), p.client, p.URL+"/livez"); err != nil {
			return process.signal(syscall.SIGKILL, true)
		}
	}
	return errors.Join(fmt.Errorf("the proxy still listens %v after SIGTERM", limit), process.signal(syscall.SIGKILL, true))
}

// PublicStatus returns the status of a GET request to the public listener.
func (p *Proxy) PublicStatus(ctx context.Context, path string) (status int, err error) {
	return getStatus(ctx, p.client, p.URL+path)
}

// PostAdmin posts an empty JSON object to path on the admin listener.
func (p *Proxy) PostAdmin(ctx context.Context, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.Admin+path, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	req.Close = true
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("POST %s: status %d: %s", path, resp.StatusCode, text)
	}
	return nil
}

// Metrics are the gauges and counters of a /metrics page, by name.
type Metrics map[string][]Sample

// Sample is the value of one series.
type Sample struct {
	Labels map[string]string
	Value  float64
}

// ReadMetrics returns the proxy's metrics.
func (p *Proxy) ReadMetrics(ctx context.Context) (Metrics, error) {
	return ReadMetrics(ctx, p.Admin+"/metrics")
}

// ReadMetrics returns the metrics at url.
func ReadMetrics(ctx context.Context, url string) (Metrics, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: status %d", url, resp.StatusCode)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	m := make(Metrics, len(families))
	for name, family := range families {
		for _, one := range family.GetMetric() {
			s := Sample{Labels: map[string]string{}, Value: one.GetGauge().GetValue() + one.GetCounter().GetValue() + one.GetUntyped().GetValue()}
			for _, l := range one.GetLabel() {
				s.Labels[l.GetName()] = l.GetValue()
			}
			m[name] = append(m[name], s)
		}
	}
	return m, nil
}

// Sum returns the sum of the series of name, or of those with the label name and value.
func (m Metrics) Sum(name string, labelAndValue ...string) float64 {
	sum := 0.0
	for _, s := range m[name] {
		if len(labelAndValue) != 2 || s.Labels[labelAndValue[0]] == labelAndValue[1] {
			sum += s.Value
		}
	}
	return sum
}
