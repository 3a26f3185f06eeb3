package backends

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
)

// maxLine bounds one line of /metrics. The longest of a real replica, its
// cache_config_info, is about 1 KB; lists of LoRA adapters can be longer.
const maxLine = 64 << 10

// maxCount is more requests, or tokens in a step or a cache, than any engine has.
// What is beyond it is garbage, and garbage is unknown.
const maxCount = 1e9

// maxEngines is far more than a data-parallel server has. The scrape remembers each.
const maxEngines = 1024

// ParseMetrics reads a replica's /metrics in any of vLLM's dialects, old and
// new, line by line and only the families that a Load has. What is missing, NaN,
// infinite, negative or absurd is unknown; what is not the text format is an
// error that names the line. An r that is a *bufio.Reader of 64 KiB or more is
// used as it is, so that a caller can reuse its buffer.
func ParseMetrics(r io.Reader) (Load, error) {
	var (
		p  scrape
		br = bufio.NewReaderSize(r, maxLine)
	)
	for n := 1; ; n++ {
		line, err := br.ReadSlice('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return p.load(), nil
		case err == io.EOF:
			// The format ends every line. A number that was cut short would look
			// like a counter that ran backwards.
			return Load{}, fmt.Errorf("metrics line %d: cut short", n)
		case errors.Is(err, bufio.ErrBufferFull):
			return Load{}, fmt.Errorf("metrics line %d: longer than %d bytes", n, maxLine)
		case err != nil:
			return Load{}, fmt.Errorf("metrics line %d: %w", n, err)
		}
		if err := p.line(trimBlank(bytes.TrimSuffix(line[:len(line)-1], []byte{'\r'}))); err != nil {
			return Load{}, fmt.Errorf("metrics line %d: %w", n, err)
		}
	}
}

// scrape gathers one answer, engine by engine. Lines may come in any order.
type scrape struct {
	totals [summed]total

	// Older V1 engines counted prefix queries and hits in blocks, and only the
	// HELP line tells: it says "queried blocks" or "queried tokens".
	unit, gpuUnit unit

	engines []engineCache
	buckets []bucket

	adapters     []byte // running_lora_adapters of the newest series, escaped
	adaptersTime float64
	maxAdapters  int

	asleep bool
}

type unit int

const (
	unitUnsaid unit = iota
	unitTokens
	unitBlocks
)

// total adds up one family's series over the engines of a data-parallel server.
type total struct {
	sum, max float64
	seen     bool
	bad      bool // one engine's part is garbage, so the whole is unknown
}

func (t *total) add(v, limit float64) {
	t.seen = true
	if !(v >= 0 && v <= limit) { // NaN too
		t.bad = true
		return
	}
	t.sum += v
	t.max = max(t.max, v)
}

func (t total) known() bool { return t.seen && !t.bad && !math.IsInf(t.sum, 0) }

// engineCache is one engine's series of cache_config_info.
type engineCache struct {
	engine                  string
	tokens, block, hitAlign int // 0: not said
	cachingOff              bool
}

// bucket is one of iteration_tokens_total, all engines together.
type bucket struct{ le, count float64 }

func (p *scrape) line(line []byte) error {
	if len(line) == 0 {
		return nil
	}
	if line[0] == '#' {
		p.help(line)
		return nil
	}
	name, rest, err := cutName(line)
	if err != nil {
		return err
	}
	f := familyOf(name)
	if f == unread {
		return nil
	}
	l, value, err := cutSample(rest)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	switch f {
	case cacheConfig:
		if !p.cacheConfig(l) {
			return fmt.Errorf("%s: more than %d engines", name, maxEngines)
		}
	case loraInfo:
		// Every combination of adapters is a series of its own, whose value is the
		// time when it was last true.
		if value >= p.adaptersTime {
			p.adapters, p.adaptersTime = append(p.adapters[:0], l.get("running_lora_adapters")...), value
			p.maxAdapters = labelInt(l.get("max_lora"))
		}
	case stepBucket:
		p.bucket(l, value)
	case sleepState:
		awake := string(l.get("sleep_state")) == "awake"
		p.asleep = p.asleep || awake && value == 0 || !awake && value > 0
	case waitingCapacity:
		if reason := string(l.get("reason")); reason == "capacity" {
			p.totals[f].add(value, maxCount)
		}
	case running, waiting:
		p.totals[f].add(value, maxCount)
	case kvUsage, gpuUsage:
		// A hair above 1 is rounding. More is another scale, and reading it as a
		// full cache would take the replica out of service.
		p.totals[f].add(value, 1.01)
	default:
		p.totals[f].add(value, math.MaxFloat64)
	}
	return nil
}

func (p *scrape) help(line []byte) {
	about, ok := bytes.CutPrefix(line, []byte("# HELP vllm:"))
	if !ok {
		return
	}
	about, gpu := bytes.CutPrefix(about, []byte("gpu_"))
	if !bytes.HasPrefix(about, []byte("prefix_cache_")) {
		return
	}
	said := unitUnsaid
	switch {
	case bytes.Contains(about, []byte(" blocks")):
		said = unitBlocks
	case bytes.Contains(about, []byte(" tokens")):
		said = unitTokens
	}
	if gpu {
		p.gpuUnit = said
	} else {
		p.unit = said
	}
}

func (p *scrape) bucket(l labels, count float64) {
	le, err := parseNumber(l.get("le"))
	if err != nil || math.IsNaN(le) || !(count >= 0 && count <= math.MaxFloat64) {
		return
	}
	for i := range p.buckets {
		if p.buckets[i].le == le {
			p.buckets[i].count += count
			return
		}
	}
	if len(p.buckets) < 64 { // vLLM has 14
		p.buckets = append(p.buckets, bucket{le, count})
	}
}

// cacheConfig reports whether there was room for one more engine.
func (p *scrape) cacheConfig(l labels) bool {
	var (
		e              engineCache
		blocks, tokens int
	)
	for {
		name, value, rest, err := l.next()
		if err != nil || name == nil {
			break
		}
		switch string(name) {
		case "engine":
			e.engine = string(value)
		case "block_size":
			e.block = labelInt(value)
		case "num_gpu_blocks":
			blocks = labelInt(value)
		case "kv_cache_size_tokens":
			tokens = labelInt(value)
		case "cache_hit_alignment_tokens":
			e.hitAlign = labelInt(value)
		case "enable_prefix_caching":
			e.cachingOff = string(value) == "False"
		}
		l = rest
	}
	if e.tokens = tokens; tokens == 0 && float64(blocks)*float64(e.block) <= maxCount {
		e.tokens = blocks * e.block
	}
	// Several API server processes can each write an engine's series, and one
	// may have written it before the engine knew its size.
	for i := range p.engines {
		if p.engines[i].engine == e.engine {
			if e.tokens >= p.engines[i].tokens {
				p.engines[i] = e
			}
			return true
		}
	}
	p.engines = append(p.engines, e)
	return len(p.engines) <= maxEngines
}

// labelInt reads a positive number that Python wrote as a string; 0 when it is
// "None", no number, or beyond maxCount.
func labelInt(value []byte) int {
	v, err := parseNumber(value)
	if err != nil || !(v >= 1 && v <= maxCount) {
		return 0
	}
	return int(v)
}
