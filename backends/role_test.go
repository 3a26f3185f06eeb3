package backends

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestParseRole(t *testing.T) {
	for name, want := range map[string]Role{"": RoleBoth, "both": RoleBoth, "prefill": RolePrefill, "decode": RoleDecode} {
		if got, err := ParseRole(name); got != want || err != nil {
			t.Errorf("%q: %v, %v", name, got, err)
		}
	}
	if _, err := ParseRole("Prefill"); err == nil {
		t.Error("Prefill is a role")
	}
}

func TestPairsWith(t *testing.T) {
	load := Load{TransfersKV: true, BlockSize: 16, CacheDtype: "auto"}
	for name, c := range map[string]struct {
		version string
		change  func(*Load)
		want    bool
	}{
		"the same":             {"0.32.0", func(*Load) {}, true},
		"another version":      {"0.33.0", func(*Load) {}, false},
		"no version":           {"", func(*Load) {}, false},
		"no connector":         {"0.32.0", func(l *Load) { l.TransfersKV = false }, false},
		"another block size":   {"0.32.0", func(l *Load) { l.BlockSize = 32 }, false},
		"another type":         {"0.32.0", func(l *Load) { l.CacheDtype = "fp8" }, false},
		"another size of both": {"0.32.0", func(l *Load) { l.CacheTokens = 5 }, true},
		"no /metrics":          {"0.32.0", nil, false},
	} {
		a, b := new(Backend), new(Backend)
		a.SetVersion("0.32.0")
		a.SetLoad(&load)
		b.SetVersion(c.version)
		if c.change != nil {
			changed := load
			c.change(&changed)
			b.SetLoad(&changed)
		}
		if a.KVForm().PairsWith(b.KVForm()) != c.want || b.KVForm().PairsWith(a.KVForm()) != c.want {
			t.Errorf("%s: pairs: %v, want %v", name, !c.want, c.want)
		}
	}
	unknown := new(Backend)
	unknown.SetLoad(&load)
	if unknown.KVForm().PairsWith(unknown.KVForm()) {
		t.Error("two unknown versions pair")
	}
}

func TestRanksHaveVersionOfTheirServer(t *testing.T) {
	server := virtual(t, nil)
	ranks := addRanks(newRegistry(t, server), server, 0, 1)
	server.SetVersion("0.32.0")
	for _, rank := range ranks {
		rank.SetLoad(&Load{TransfersKV: true})
		if rank.Version() != "0.32.0" || !rank.KVForm().PairsWith(ranks[0].KVForm()) {
			t.Errorf("%s has version %q", rank.Name, rank.Version())
		}
	}
}

// process is a replica in virtual time: its process, which can be replaced.
type process struct {
	version atomic.Pointer[string] // nil: none runs
	started atomic.Int64
	lacks   atomic.Bool // /version
	asked   atomic.Int32
}

func (p *process) start(version string) {
	p.started.Add(1)
	p.version.Store(&version)
}

func (p *process) RoundTrip(r *http.Request) (*http.Response, error) {
	version := p.version.Load()
	switch {
	case version == nil:
		return nil, syscall.ECONNREFUSED
	case r.URL.Path == "/version" && !p.lacks.Load():
		p.asked.Add(1)
		return respond(200, `{"version":"`+*version+`"}`)
	case r.URL.Path == "/metrics":
		return respond(200, vllmMetrics(float64(p.started.Load()), 1, 0, 0)+fmt.Sprintf(
			"vllm:nixl_num_kv_expired_reqs_total 0\nvllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",num_gpu_blocks=\"%d\"} 1\n",
			p.started.Load()))
	}
	return health(well).RoundTrip(r)
}

// watchProcesses has the backends of processes checked and polled until the function that it returns is called.
func watchProcesses(t *testing.T, processes ...*process) (list []*Backend, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, p := range processes {
		b := virtual(t, p.RoundTrip)
		list = append(list, b)
		running.Go(func() { new(Checker).Watch(ctx, b) })
		running.Go(func() { new(Poller).Watch(ctx, b) })
	}
	return list, func() { cancel(); running.Wait() }
}

func TestVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &process{}
		p.start("0.32.0")
		list, stop := watchProcesses(t, p)
		defer stop()
		b := list[0]
		time.Sleep(time.Minute)
		if b.Version() != "0.32.0" || p.asked.Load() != 1 {
			t.Errorf("version %q after %d requests", b.Version(), p.asked.Load())
		}
		p.start("0.33.0") // which only its metrics tell
		time.Sleep(10 * time.Second)
		if b.Version() != "0.33.0" || p.asked.Load() != 2 {
			t.Errorf("another process: version %q after %d requests", b.Version(), p.asked.Load())
		}
		p.version.Store(nil)
		time.Sleep(10 * time.Second)
		if b.Version() != "" {
			t.Errorf("nothing listens: version %q", b.Version())
		}
		p.lacks.Store(true)
		p.start("0.2.0")
		time.Sleep(10 * time.Second)
		if b.State() != Ready || b.Version() != "" {
			t.Errorf("without /version: %v, version %q", b.State(), b.Version())
		}
	})
}

// Replicas are updated one after another: a request never goes to two that run different versions.
func TestRollingUpdateNeverPairsTwoVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := &process{}, &process{}
		p.start("0.32.0")
		d.start("0.32.0")
		list, stop := watchProcesses(t, p, d)
		defer stop()
		pairedFor := func(wait time.Duration) (paired bool) {
			for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				paired = list[0].State() == Ready && list[1].State() == Ready && list[0].KVForm().PairsWith(list[1].KVForm())
				of, and := p.version.Load(), d.version.Load()
				if paired && of != nil && and != nil && *of != *and {
					t.Fatalf("%s is paired with %s", *of, *and)
				}
			}
			return paired
		}
		if !pairedFor(10 * time.Second) {
			t.Error("not paired before the update")
		}
		for i, updated := range []*process{p, d} {
			updated.version.Store(nil)
			if pairedFor(20 * time.Second) {
				t.Errorf("paired although %d is down", i)
			}
			updated.start("0.33.0")
			if paired := pairedFor(20 * time.Second); paired != (updated == d) {
				t.Errorf("after the update of %d: paired %v", i, paired)
			}
		}
	})
}
