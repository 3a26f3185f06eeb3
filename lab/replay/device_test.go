package replay

import (
	"strings"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
)

// TestSharedDevice plays one prompt on each of two replicas, with a device each and with one for both.
func TestSharedDevice(t *testing.T) {
	// Each prompt takes 100 ms of prefill, in one step of 8 ms.
	e := engine.Config{PrefillRate: 10_000, StepTime: 8 * time.Millisecond, QuadraticDepth: engine.LinearPrefill,
		PromptTokenTime: engine.NoAPIServer}
	f := func(name string, devices []int, second time.Duration, first, last float64) {
		t.Helper()
		s := Scenario{Backends: 2, Policy: "round-robin", Engine: e, Devices: devices,
			Workload: jobs{asks(0, 1000, 1, 1), asks(second, 1000, 1, 2)}}
		r, sum := mustPlay(t, &s)
		slowest := r.last - second
		if mean := (first + last) / 2; sum.E2EMean < mean-1e-6 || sum.E2EMean > mean+1e-6 || slowest < time.Duration(last*1e9)-time.Microsecond ||
			slowest > time.Duration(last*1e9)+time.Microsecond {
			t.Errorf("%s: mean %v s, the last one %v; want %v and %v s", name, sum.E2EMean, slowest, mean, last)
		}
	}
	f("own devices", nil, 0, 0.108, 0.108)
	f("different devices", []int{4, 2}, 0, 0.108, 0.108)
	f("one device", []int{0, 0}, 0, 0.216, 0.216)
	// Both work from 58 ms on: the first has 50 ms left, and the second 108, of which it has 58 left when the first ends.
	f("one device, the second one later", []int{0, 0}, 58*time.Millisecond, 0.158, 0.158)
	f("one device, one after the other", []int{0, 0}, 200*time.Millisecond, 0.108, 0.108)
}

func TestDevicesKnownToRouter(t *testing.T) {
	s := Scenario{Backends: 3, Devices: []int{7, 1, 7}}
	for i, want := range []string{"device-7", "device-1", "device-7"} {
		if got := s.deviceName(i); got != want {
			t.Errorf("backend %d is on %q, want %q", i, got, want)
		}
	}
	s.DevicesUnknown = true
	if got := s.deviceName(0); got != "" {
		t.Errorf("the router is told of %q", got)
	}
	s.Workload, s.Devices = jobs{}, []int{1}
	if err := s.validate(); err == nil || !strings.Contains(err.Error(), "1 devices for 3 backends") {
		t.Errorf("error %v", err)
	}
}

// TestRestartOnSharedDevice aborts a step, after which the other replica has the device to itself.
func TestRestartOnSharedDevice(t *testing.T) {
	s := Scenario{
		Backends: 2, Policy: "round-robin", Devices: []int{0, 0}, Engine: engine.Config{PrefillRate: 1000, StepTime: time.Millisecond,
			QuadraticDepth: engine.LinearPrefill},
		Changes:  []Change{{At: 500 * time.Millisecond, Backend: 1, Kind: Restart, Away: time.Hour}},
		Workload: jobs{asks(0, 999, 1, 1), asks(0, 999, 1, 2)},
	}
	// Half of the time until the restart, then 750 ms alone, in which the retry waits; then 1 s.
	if _, sum := mustPlay(t, &s); sum.E2EMean < (1.25+2.25)/2-1e-3 || sum.E2EMean > (1.25+2.25)/2+1e-3 {
		t.Errorf("mean %v s, want 1.75", sum.E2EMean)
	}
}
