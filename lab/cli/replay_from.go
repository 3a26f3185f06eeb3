package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"warmroute/admin"
	"warmroute/backends"
	"warmroute/cli"
	"warmroute/config"
	"warmroute/lab/replay"
)

const (
	recordingTimeout       = time.Minute
	maxRecordingBytes      = 1 << 30 // of text
	maxRecordingHeaderSize = 1 << 20 // thousands of backends
)

// liveTraffic is the traffic that a running proxy has recorded in memory, and its fleet.
type liveTraffic struct {
	trace  *replay.Trace
	header admin.RecordingHeader
}

// readLiveTraffic reads the recording of the proxy that --from names.
func (o *replayOptions) readLiveTraffic(ctx context.Context, configs config.Loader) (*liveTraffic, error) {
	ctx, cancel := context.WithTimeout(ctx, recordingTimeout)
	defer cancel()
	listener := cli.AdminListener{URL: o.from, TokenFile: o.tokenFile, CAFile: o.caFile, Config: o.config, URLFlag: "from"}
	body, err := listener.Get(ctx, configs, "/api/recording")
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return parseLiveTraffic(io.LimitReader(body, maxRecordingBytes))
}

// parseLiveTraffic parses a recording whose first line has the fleet.
func parseLiveTraffic(r io.Reader) (*liveTraffic, error) {
	text := bufio.NewReaderSize(r, maxRecordingHeaderSize)
	first, err := text.ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("read the first line of the recording: %w", err)
	}
	var t liveTraffic
	if err := json.Unmarshal(first, &t.header); err != nil {
		return nil, fmt.Errorf("parse the first line of the recording: %w", err)
	}
	first = bytes.Clone(first)
	if _, err := text.Peek(1); errors.Is(err, io.EOF) {
		return nil, errors.New("the proxy has recorded no request yet: repeat this when it has served some")
	}
	if t.trace, err = replay.ParseTrace(io.MultiReader(bytes.NewReader(first), text)); err != nil {
		return nil, fmt.Errorf("parse the recording: %w", err)
	}
	return &t, nil
}

// liveFleet is a simulated fleet like that of a running proxy.
type liveFleet struct {
	backends []admin.RecordedBackend // that are ready; all if none is; those for prefill come first, then those for decode
	prefills int                     // of them, for prefill
	decodes  int                     // for decode
	kvTokens int                     // of each, the mean; 0: unknown
	typical  admin.RecordedBackend   // the one with the median prefill rate
	speeds   []float64               // relative to typical
	devices  []int                   // nil: each has its own
	modelOf  []int                   // nil: each serves all models
	groupOf  map[uint64]int          // for each number of a model in the recording, what modelOf has for its backends
}

// newLiveFleet returns the fleet that a recording's header describes. It fails if there is no backend.
func newLiveFleet(all []admin.RecordedBackend) (*liveFleet, error) {
	ready := slices.DeleteFunc(slices.Clone(all), func(b admin.RecordedBackend) bool { return !b.Ready })
	if len(ready) == 0 {
		ready = all
	}
	if len(ready) == 0 || len(ready) > maxReplayBackends {
		return nil, fmt.Errorf("the proxy has %d backends, expected 1 to %d", len(ready), maxReplayBackends)
	}
	f := &liveFleet{}
	if err := f.setBackends(ready); err != nil {
		return nil, err
	}
	ready = f.backends
	byRate := slices.Clone(ready)
	slices.SortStableFunc(byRate, func(a, b admin.RecordedBackend) int { return cmp.Compare(a.Step.Rate, b.Step.Rate) })
	f.typical = byRate[len(byRate)/2]
	known, devices := 0, map[string]int{}
	for i, b := range ready {
		if b.KVTokens > 0 {
			f.kvTokens += b.KVTokens
			known++
		}
		speed := b.Step.Rate / f.typical.Step.Rate
		if !(speed >= minSpeed && speed <= maxSpeed) {
			return nil, fmt.Errorf("backend %d computes %g prompt tokens a second, another one %g", i, b.Step.Rate, f.typical.Step.Rate)
		}
		f.speeds = append(f.speeds, speed)
		number := i
		if first, ok := devices[b.Device]; ok && b.Device != "" {
			number = first
		}
		devices[b.Device] = number
		f.devices = append(f.devices, number)
	}
	f.kvTokens /= max(1, known)
	f.divideByModel()
	return f, nil
}

// setBackends sets the backends, in the order of their roles that a replay.Scenario has.
func (f *liveFleet) setBackends(list []admin.RecordedBackend) error {
	byRole := map[backends.Role][]admin.RecordedBackend{}
	for i, b := range list {
		role, err := backends.ParseRole(b.Role)
		if err != nil {
			return fmt.Errorf("backend %d: %w", i, err)
		}
		byRole[role] = append(byRole[role], b)
	}
	f.prefills, f.decodes = len(byRole[backends.RolePrefill]), len(byRole[backends.RoleDecode])
	f.backends = slices.Concat(byRole[backends.RolePrefill], byRole[backends.RoleDecode], byRole[backends.RoleBoth])
	return nil
}

// divideByModel sets modelOf and groupOf: backends that serve a model in common, or are connected by such ones, are one
// group.
func (f *liveFleet) divideByModel() {
	group := make([]int, len(f.backends)) // of each backend
	owner := map[uint64]int{}             // for each model a backend that serves it
	for i := range group {
		group[i] = i
	}
	for i, b := range f.backends {
		for _, model := range b.Models {
			other, known := owner[model]
			if !known {
				owner[model] = i
				continue
			}
			from, to := group[i], group[other]
			for k := range group {
				if group[k] == from {
					group[k] = to
				}
			}
		}
	}
	f.groupOf = map[uint64]int{}
	if len(owner) == 0 { // the recorded models are not known any more
		f.modelOf = make([]int, len(group))
		return
	}
	numbers := map[int]int{} // groups as 0, 1, …
	for i := range group {
		if _, known := numbers[group[i]]; !known {
			numbers[group[i]] = len(numbers)
		}
		f.modelOf = append(f.modelOf, numbers[group[i]])
	}
	for model, i := range owner {
		f.groupOf[model] = f.modelOf[i]
	}
}

// servesSeveralModels reports whether not every backend may take every request.
func (f *liveFleet) servesSeveralModels() bool { return slices.Max(f.modelOf) > 0 }

// apply sets the fleet of a scenario, except for what flags have set.
func (f *liveFleet) apply(s *replay.Scenario, isSet func(flag string) bool) (err error) {
	if !isSet("step") {
		if s.Engine, err = engineWithStep(f.typical.Step, s.Engine); err != nil {
			return fmt.Errorf("times of steps that the proxy has learned: %w", err)
		}
	}
	if !isSet("kv-tokens") {
		s.KVTokens = f.kvTokens
	}
	if isSet("backends") {
		return nil
	}
	s.Backends = len(f.backends)
	if !isSet("speeds") {
		s.Speeds = f.speeds
	}
	if !isSet("per-device") {
		s.Devices = f.devices
	}
	if f.servesSeveralModels() {
		s.ModelOf = f.modelOf
	}
	return nil
}

// describe returns what the recording covers and on what it is replayed.
func (t *liveTraffic) describe(f *liveFleet, s *replay.Scenario) string {
	var b strings.Builder
	requests := t.trace.Requests
	span := requests[len(requests)-1].At - requests[0].At
	fmt.Fprintf(&b, "%d requests of %v until %s, on %d simulated replicas", len(requests), span.Round(time.Second),
		t.header.Now.Format("15:04:05 MST"), s.Backends)
	if n := len(t.header.Backends) - len(f.backends); n > 0 {
		fmt.Fprintf(&b, " (%d more are not ready)", n)
	}
	if f.prefills > 0 && s.Backends == len(f.backends) {
		fmt.Fprintf(&b, ", %d of them for prefill and %d for decode,", f.prefills, f.decodes)
	}
	if s.KVTokens > 0 {
		fmt.Fprintf(&b, " with %d tokens of KV cache each", s.KVTokens)
	} else {
		b.WriteString(" with the default KV cache, since the size of theirs is unknown")
	}
	fmt.Fprintf(&b, ".\nTheir steps take what the proxy has learned: %.0f prompt tokens a second, %.2g ms for a step.\n",
		s.Engine.PrefillRate, s.Engine.StepTime.Seconds()*1000)
	if s.Speeds != nil && slices.Max(f.speeds) > 1.2*slices.Min(f.speeds) {
		fmt.Fprintf(&b, "The slowest replica has %.2f times that speed, the fastest %.2f times.\n", slices.Min(f.speeds), slices.Max(f.speeds))
	}
	if t.header.Cut {
		b.WriteString("The proxy has no memory for more of the last hour: raise recording.memory to cover it.\n")
	}
	fmt.Fprintf(&b, "The proxy uses the policy %s.\n", t.header.Policy)
	return b.String()
}
