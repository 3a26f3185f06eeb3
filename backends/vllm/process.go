package vllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// maxVersionBytes bounds a version. Those of builds from source have about 40 bytes.
const maxVersionBytes = 100

// ParseVersion returns the version of vLLM in a response to GET /version.
func ParseVersion(body []byte) (string, error) {
	var v struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return "", err
	}
	isOther := func(r rune) bool { return r <= ' ' || r > '~' }
	if v.Version == "" || len(v.Version) > maxVersionBytes || strings.ContainsFunc(v.Version, isOther) {
		return "", errors.New("version is missing or invalid")
	}
	return v.Version, nil
}

// Process identifies the process that has written a /metrics, as far as it shows.
type Process struct {
	StartTime     float64 // process_start_time_seconds, in steps of 10 ms; 0: not reported
	CPUSeconds    float64 // a counter that grows with each request, also one for /metrics
	ResidentBytes float64
}

// ParseProcess reads the metrics about the process from a response to /metrics. It ignores lines that it cannot read.
func ParseProcess(metrics []byte) (p Process) {
	fields := map[string]*float64{
		"process_start_time_seconds":    &p.StartTime,
		"process_cpu_seconds_total":     &p.CPUSeconds,
		"process_resident_memory_bytes": &p.ResidentBytes,
	}
	for line := range bytes.Lines(metrics) {
		name, rest, err := cutMetricName(bytes.TrimSpace(line))
		if err != nil {
			continue
		}
		if field := fields[string(name)]; field != nil {
			_, *field, _ = parseSample(rest)
		}
	}
	return p
}

// IsSameProcess reports whether one process has written three responses in this order: before and after over one
// address, between over another. Replicas that were started together have the same start time within its step,
// but not the same CPU time. It is not certain that they are different processes if only the memory differs, which
// changes while a process works.
func IsSameProcess(before, between, after Process) (same, certain bool) {
	if before.StartTime <= 0 || before.StartTime != between.StartTime || before.StartTime != after.StartTime ||
		before.CPUSeconds <= 0 || before.CPUSeconds > between.CPUSeconds || between.CPUSeconds > after.CPUSeconds {
		return false, true
	}
	same = isBetween(between.ResidentBytes, before.ResidentBytes, after.ResidentBytes)
	return same, same
}

func isBetween(x, a, b float64) bool { return min(a, b) <= x && x <= max(a, b) }
