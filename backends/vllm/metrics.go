// Package vllm interprets what differs between vLLM's versions: the names of its metrics,
// its model cards, and the texts of its errors. It imports no other package of this program.
package vllm

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"
)

const (
	// MaxLineBytes bounds one line of /metrics. The longest of a real replica, its
	// cache_config_info, is about 1 KB; lists of LoRA adapters can be longer.
	MaxLineBytes = 64 << 10

	// maxCount is above any engine's number of requests, or of tokens in a step or
	// a cache. Values beyond it are treated as unknown.
	maxCount = 1e9

	maxEngines = 1024 // of a data-parallel server
	// maxEngineLabel is above any rank, and small enough for every use of it.
	maxEngineLabel = 1<<16 - 1
)

// ParseMetrics reads the /metrics of any version of vLLM, line by line and only the families that a
// Load has. Values that are missing, NaN, infinite, negative or out of range are unknown; anything
// but the text format is an error that names the line. A *bufio.Reader of MaxLineBytes or more is
// used as it is, so that a caller can reuse its buffer.
func ParseMetrics(r io.Reader) (Load, error) {
	var (
		p  sampleSums
		br = bufio.NewReaderSize(r, MaxLineBytes)
	)
	for n := 1; ; n++ {
		line, err := br.ReadSlice('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return p.toLoad(), nil
		case err == io.EOF:
			// A truncated number would look like a counter that decreased.
			return Load{}, fmt.Errorf("metrics line %d: truncated", n)
		case errors.Is(err, bufio.ErrBufferFull):
			return Load{}, fmt.Errorf("metrics line %d: longer than %d bytes", n, MaxLineBytes)
		case err != nil:
			return Load{}, fmt.Errorf("metrics line %d: %w", n, err)
		}
		if err := p.parseLine(trimLeadingBlanks(bytes.TrimSuffix(line[:len(line)-1], []byte{'\r'}))); err != nil {
			return Load{}, fmt.Errorf("metrics line %d: %w", n, err)
		}
	}
}

// Load is one poll of a replica's /metrics, summed over the engines of a data-parallel server.
// Never modified once published. Where a Known flag is false the replica did not report the value,
// which must not be read as 0. It has more than twenty fields because /metrics has.
type Load struct {
	Running, Waiting int
	QueuesKnown      bool // Running and Waiting were reported

	WaitingForCapacity int // part of Waiting that means overload; all of Waiting on versions that do not tell

	KVCacheUsage float64 // 0 to 1, despite the "_perc" in vLLM's name; the mean over engines
	KVKnown      bool

	Engines int // data-parallel engines that reported their cache; 0 when unknown

	// CacheTokens is the KV cache's size in tokens, summed over engines; 0 when unknown.
	CacheTokens int
	// KeepsCheckpoints: the model's layers are not all of full attention. The states of the others are kept at a few
	// boundaries, up to which a prefix can be reused, in blocks of the same pool. PoolTokens is what all blocks have room for, if
	// so; CacheTokens is less.
	KeepsCheckpoints bool
	PoolTokens       int
	AlignsStates     bool // some of the layers are of linear attention or a state space: mamba_cache_mode is align
	BlockSize        int  // tokens; 0 when unknown
	// HitAlignment is what a cache hit is a multiple of, in tokens: cache_hit_alignment_tokens where reported, else
	// effective_attention_block_size, which is larger than BlockSize where a block of full attention has more tokens than one of
	// another kind; else BlockSize; 0 when unknown.
	HitAlignment int
	CacheDtype   string // of the KV cache, as configured: "auto" is the model's; "" when unknown
	// PrefixCachingOff is true only when the replica reports it.
	PrefixCachingOff bool
	TransfersKV      bool // it has a connector, which transfers KV caches between replicas

	// Counters, in tokens. PrefixHits includes HostHits.
	PrefixQueries, PrefixHits float64
	PrefixKnown               bool
	// HostHits counts hits on blocks that the replica loaded from host memory or a disk,
	// since the GPU had evicted them.
	HostHits      float64
	HostHitsKnown bool

	PromptTokens, GenerationTokens float64 // counters; they grow while the engine makes progress
	TokensKnown                    bool    // both were reported

	Gaps, GapSeconds               float64 // between two outputs of a response: how many so far, and their sum; 0 when unknown
	FirstTokens, FirstTokenSeconds float64 // of responses: how many so far, and the sum of the times to them; 0 when unknown

	Asleep      bool      // engine_sleep_state is anything but awake
	AsleepSince time.Time // when the first of the consecutive polls that say so was sent; set by the poller

	RunningAdapters []string // LoRA adapters with running requests
	MaxAdapters     int      // that can run at once; 0 when unknown

	StartTime float64 // process_start_time_seconds; 0 when absent

	// Set by the poller:
	OwnInFlight int64     // sequences in flight before or after the poll, whichever was more: ours, and those that other proxies report
	PolledAt    time.Time // when the poll was sent

	// PerEngine are the loads of the engines of a data-parallel server, by label; nil unless there are
	// two or more, each with a number as its label. What has no such label belongs to all of them.
	PerEngine []EngineLoad
}

// EngineLoad is the part of a Load that one data-parallel engine has.
type EngineLoad struct {
	Engine int // label "engine": the engine's rank among those of all servers that share the model
	Load
}

// quantity is what a metric measures.
type quantity int

const (
	running quantity = iota
	waiting
	waitingForCapacity
	kvUsage
	prefixQueries
	gpuPrefixQueries // prefixQueries before 0.9
	prefixHits
	gpuPrefixHits
	hostHits // all hits that were not on the GPU, on versions that do not tell them apart
	promptTokens
	generationTokens
	gaps
	gapSeconds
	firstTokens
	firstTokenSeconds
	startTime
	summed // quantities below have labels that are read instead of a value

	cacheConfig
	loraInfo
	sleepState
)

// metric is one of the names that vLLM has given to a quantity. Some versions write several, which
// must not be added up.
type metric struct {
	quantity quantity
	name     int     // below maxNames; the first one is preferred
	maxValue float64 // of a sample; a larger one is not known
}

const maxNames = 4 // of a quantity

// metrics are those that are read. Counters may lack the _total that Python adds, as some
// exporters write them; the _created series beside them is not read. Never modified.
var metrics = map[string]metric{
	"vllm:num_requests_running":           {running, 0, maxCount},
	"vllm:num_requests_waiting":           {waiting, 0, maxCount},
	"vllm:num_requests_waiting_by_reason": {waitingForCapacity, 0, maxCount},
	// Slightly above 1 is rounding. More is another scale: reading it as a full cache would take
	// the replica out of service.
	"vllm:kv_cache_usage_perc":                  {kvUsage, 0, 1.01},
	"vllm:gpu_cache_usage_perc":                 {kvUsage, 1, 1.01}, // before 0.10
	"vllm:prefix_cache_queries_total":           {prefixQueries, 0, math.MaxFloat64},
	"vllm:prefix_cache_queries":                 {prefixQueries, 1, math.MaxFloat64},
	"vllm:gpu_prefix_cache_queries_total":       {gpuPrefixQueries, 0, math.MaxFloat64},
	"vllm:gpu_prefix_cache_queries":             {gpuPrefixQueries, 1, math.MaxFloat64},
	"vllm:prefix_cache_hits_total":              {prefixHits, 0, math.MaxFloat64},
	"vllm:prefix_cache_hits":                    {prefixHits, 1, math.MaxFloat64},
	"vllm:gpu_prefix_cache_hits_total":          {gpuPrefixHits, 0, math.MaxFloat64},
	"vllm:gpu_prefix_cache_hits":                {gpuPrefixHits, 1, math.MaxFloat64},
	"vllm:prompt_tokens_cached_by_source_total": {hostHits, 0, math.MaxFloat64},
	"vllm:prompt_tokens_cached_by_source":       {hostHits, 1, math.MaxFloat64},
	"vllm:external_prefix_cache_hits_total":     {hostHits, 2, math.MaxFloat64},
	"vllm:external_prefix_cache_hits":           {hostHits, 3, math.MaxFloat64},
	"vllm:prompt_tokens_total":                  {promptTokens, 0, math.MaxFloat64},
	"vllm:prompt_tokens":                        {promptTokens, 1, math.MaxFloat64},
	"vllm:generation_tokens_total":              {generationTokens, 0, math.MaxFloat64},
	"vllm:generation_tokens":                    {generationTokens, 1, math.MaxFloat64},
	"vllm:inter_token_latency_seconds_count":    {gaps, 0, math.MaxFloat64},
	"vllm:inter_token_latency_seconds_sum":      {gapSeconds, 0, math.MaxFloat64},
	"vllm:time_per_output_token_seconds_count":  {gaps, 1, math.MaxFloat64}, // before 0.11
	"vllm:time_per_output_token_seconds_sum":    {gapSeconds, 1, math.MaxFloat64},
	"vllm:time_to_first_token_seconds_count":    {firstTokens, 0, math.MaxFloat64},
	"vllm:time_to_first_token_seconds_sum":      {firstTokenSeconds, 0, math.MaxFloat64},
	"process_start_time_seconds":                {startTime, 0, math.MaxFloat64},
	"vllm:cache_config_info":                    {quantity: cacheConfig},
	"vllm:lora_requests_info":                   {quantity: loraInfo},
	"vllm:engine_sleep_state":                   {quantity: sleepState},
}

// sampleSums collects the samples of one response. The lines may be in any order.
type sampleSums struct {
	totals totals // of all engines, and of what has no label engine

	// What is in totals of each engine, so that a replica with one engine costs no allocation; see engine.
	unlabeled, first engineSums
	further          []engineSums
	indexes          map[string]int // of further, by label
	engines          int            // with a label
	latest           int            // index of the engine of the last sample

	// Older V1 engines counted prefix queries and hits in blocks, which only the
	// HELP line tells: "queried blocks" or "queried tokens".
	unit, gpuUnit unit

	transfersKV bool // a metric of NixlConnector is there

	adapters     []byte // running_lora_adapters of the newest series, escaped
	adaptersTime float64
	maxAdapters  int
}

// totals are the sums of the families that are read.
type totals [summed][maxNames]total

// engineSums are the samples of one engine.
type engineSums struct {
	label string // escaped
	totals
	cache    engineCache
	hasCache bool // cache was reported
	asleep   bool
}

type unit int

const (
	unitUnknown unit = iota
	unitTokens
	unitBlocks
)

// total is the sum of one family, over engines or of one.
type total struct {
	sum, max float64
	samples  int
	invalid  bool // one engine's part was out of range, so the sum is unknown
}

// addOrInvalidate adds value, or makes the sum unknown if value is not from 0 to maxValue.
func (t *total) addOrInvalidate(value, maxValue float64) {
	t.samples++
	if !(value >= 0 && value <= maxValue) { // NaN too
		t.invalid = true
		return
	}
	t.sum += value
	t.max = max(t.max, value)
}

func (t total) isKnown() bool { return t.samples > 0 && !t.invalid && !math.IsInf(t.sum, 0) }

func (t total) mean() float64 { return t.sum / float64(t.samples) }

// minFullAttentionShare is the share of a cache's blocks that the tokens of a prompt fill at least, where all layers are of full attention:
// rounding takes the rest.
const minFullAttentionShare = 0.97

// engineCache is one engine's series of cache_config_info.
type engineCache struct {
	tokens         int // of its own cache; 0: not reported
	serverTokens   int // of all engines' caches together: num_gpu_blocks counts those of all; 0: not reported
	block          int // tokens in the smallest block of all groups; 0: not reported
	attentionBlock int // in one of full attention; 0: not reported
	hitAlign       int // 0: not reported
	dtype          string
	cachingOff     bool
	alignsStates   bool // mamba_cache_mode is align: states are kept at boundaries
}

func (p *sampleSums) parseLine(line []byte) error {
	if len(line) == 0 {
		return nil
	}
	if line[0] == '#' {
		p.setPrefixUnit(line)
		return nil
	}
	name, rest, err := cutMetricName(line)
	if err != nil {
		return err
	}
	m, isRead := metrics[string(name)]
	if !isRead {
		p.transfersKV = p.transfersKV || bytes.HasPrefix(name, []byte("vllm:nixl_"))
		return nil
	}
	l, value, err := parseSample(rest)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	e := p.selectOrAddEngine(l.get("engine"))
	if e == nil {
		return fmt.Errorf("%s: more than %d engines", name, maxEngines)
	}
	switch m.quantity {
	case cacheConfig:
		e.setCache(l)
	case loraInfo:
		// Each combination of adapters is a series, whose value is the time when
		// it was last current.
		if value >= p.adaptersTime {
			p.adapters, p.adaptersTime = append(p.adapters[:0], l.get("running_lora_adapters")...), value
			p.maxAdapters = parsePositiveInt(l.get("max_lora"))
		}
	case sleepState:
		awake := string(l.get("sleep_state")) == "awake"
		e.asleep = e.asleep || awake && value == 0 || !awake && value > 0
	case waitingForCapacity:
		if string(l.get("reason")) != "capacity" {
			return nil
		}
	case hostHits:
		// What another replica sent does not say what this one holds.
		if source := string(l.get("source")); source == "device" || source == "p2p" {
			return nil
		}
	}
	if m.quantity < summed {
		p.totals[m.quantity][m.name].addOrInvalidate(value, m.maxValue)
		e.totals[m.quantity][m.name].addOrInvalidate(value, m.maxValue)
	}
	return nil
}

// engine returns the sums of an engine by its index: 0 is for samples without the label engine.
func (p *sampleSums) engine(index int) *engineSums {
	switch index {
	case 0:
		return &p.unlabeled
	case 1:
		return &p.first
	}
	return &p.further[index-2]
}

// selectOrAddEngine returns the sums of the engine with a label, or nil if there would be more than maxEngines.
func (p *sampleSums) selectOrAddEngine(label []byte) *engineSums {
	if latest := p.engine(p.latest); latest.label == string(label) {
		return latest
	}
	known, ok := p.indexes[string(label)]
	switch {
	case len(label) == 0:
		p.latest = 0
	case p.engines > 0 && p.first.label == string(label):
		p.latest = 1
	case ok:
		p.latest = known
	case p.engines == maxEngines:
		return nil
	case p.engines == 0:
		p.engines, p.latest = 1, 1
		p.first.label = string(label)
	default:
		if p.indexes == nil {
			p.indexes = map[string]int{}
		}
		p.engines++
		p.latest = p.engines
		p.further = append(p.further, engineSums{label: string(label)})
		p.indexes[string(label)] = p.latest
	}
	return p.engine(p.latest)
}

// setPrefixUnit sets the unit of the prefix counters from their HELP line. It ignores other lines.
func (p *sampleSums) setPrefixUnit(helpLine []byte) {
	about, ok := bytes.CutPrefix(helpLine, []byte("# HELP vllm:"))
	if !ok {
		return
	}
	about, gpu := bytes.CutPrefix(about, []byte("gpu_"))
	if !bytes.HasPrefix(about, []byte("prefix_cache_")) {
		return
	}
	unit := unitUnknown
	switch {
	case bytes.Contains(about, []byte(" blocks")):
		unit = unitBlocks
	case bytes.Contains(about, []byte(" tokens")):
		unit = unitTokens
	}
	if gpu {
		p.gpuUnit = unit
	} else {
		p.unit = unit
	}
}

// setCache sets the engine's cache from the labels of a series of cache_config_info.
func (s *engineSums) setCache(l labels) {
	var (
		e      engineCache
		blocks int
	)
	for {
		name, value, rest, err := l.cutLabel()
		if err != nil || name == nil {
			break
		}
		switch string(name) {
		case "block_size":
			e.block = parsePositiveInt(value)
		case "cache_dtype":
			e.dtype = unescape(value)
		case "num_gpu_blocks":
			blocks = parsePositiveInt(value)
		case "kv_cache_size_tokens":
			e.tokens = parsePositiveInt(value)
		case "cache_hit_alignment_tokens":
			e.hitAlign = parsePositiveInt(value)
		case "effective_attention_block_size":
			e.attentionBlock = parsePositiveInt(value)
		case "mamba_cache_mode":
			e.alignsStates = string(value) == "align"
		case "enable_prefix_caching":
			e.cachingOff = string(value) == "False"
		}
		l = rest
	}
	e.attentionBlock = max(e.attentionBlock, e.block)
	if float64(blocks)*float64(e.attentionBlock) <= maxCount {
		e.serverTokens = blocks * e.attentionBlock
	}
	// Several API server processes can each report an engine, one of them from
	// before the engine knew its size.
	if !s.hasCache || e.size() >= s.cache.size() {
		s.cache, s.hasCache = e, true
	}
}

// size orders the series of one engine: the larger one is from when the engine knew its cache.
func (e *engineCache) size() int { return max(e.tokens, e.serverTokens) }

// parsePositiveInt returns the positive number in a label; 0 when it is "None", not a
// number, or beyond maxCount.
func parsePositiveInt(value []byte) int {
	if string(value) == "None" { // without the cost of an error
		return 0
	}
	v, err := parseNumber(value)
	if err != nil || !(v >= 1 && v <= maxCount) {
		return 0
	}
	return int(v)
}

// toLoad returns the collected samples as a Load.
func (p *sampleSums) toLoad() Load {
	l := p.newLoad(&p.totals, 0, p.engines+1, 1)
	if p.engines > 1 {
		l.PerEngine = p.perEngine(l.Engines)
	}
	return l
}

// perEngine returns the load of each engine, sorted, or nil if a label is not the number of a rank. caches is
// how many engines have reported one.
func (p *sampleSums) perEngine(caches int) []EngineLoad {
	loads := make([]EngineLoad, 0, p.engines)
	for i := 1; i <= p.engines; i++ {
		rank, err := strconv.Atoi(p.engine(i).label)
		if err != nil || rank < 0 || rank > maxEngineLabel || strconv.Itoa(rank) != p.engine(i).label {
			return nil
		}
		own := p.engine(i).totals
		for q := range own {
			for name := range own[q] {
				if own[q][name].samples == 0 {
					own[q][name] = p.unlabeled.totals[q][name]
				}
			}
		}
		loads = append(loads, EngineLoad{rank, p.newLoad(&own, i, i+1, max(1, caches))})
	}
	slices.SortFunc(loads, func(a, b EngineLoad) int { return cmp.Compare(a.Engine, b.Engine) })
	return loads
}

// newLoad returns the Load of the engines with these indexes, whose sums are t. sharers is how many engines have
// the cache that each of them reports as the server's.
func (p *sampleSums) newLoad(t *totals, from, to, sharers int) Load {
	var l Load
	run, runOK := t.firstKnown(running)
	wait, waitOK := t.firstKnown(waiting)
	if runOK && waitOK {
		l.Running, l.Waiting, l.QueuesKnown = int(run.sum), int(wait.sum), true
		l.WaitingForCapacity = l.Waiting
		if c, ok := t.firstKnown(waitingForCapacity); ok {
			l.WaitingForCapacity = int(c.sum)
		}
	}
	if usage, ok := t.firstKnown(kvUsage); ok {
		l.KVCacheUsage, l.KVKnown = min(usage.mean(), 1), true
	}
	p.setEngines(&l, from, to, sharers)
	p.setPrefixCounters(&l, t)
	prompt, promptOK := t.firstKnown(promptTokens)
	generation, generationOK := t.firstKnown(generationTokens)
	if promptOK && generationOK {
		l.PromptTokens, l.GenerationTokens, l.TokensKnown = prompt.sum, generation.sum, true
	}
	count, _ := t.firstKnown(gaps)
	seconds, _ := t.firstKnown(gapSeconds)
	l.Gaps, l.GapSeconds = count.sum, seconds.sum
	count, _ = t.firstKnown(firstTokens)
	seconds, _ = t.firstKnown(firstTokenSeconds)
	l.FirstTokens, l.FirstTokenSeconds = count.sum, seconds.sum
	start, _ := t.firstKnown(startTime)
	l.StartTime = start.max
	for name := range bytes.SplitSeq(p.adapters, []byte(",")) {
		if name = bytes.TrimSpace(name); len(name) > 0 {
			l.RunningAdapters = append(l.RunningAdapters, unescape(name))
		}
	}
	l.MaxAdapters = p.maxAdapters
	l.TransfersKV = p.transfersKV
	return l
}

// firstKnown returns the total under the first name of a quantity under which it is known.
func (t *totals) firstKnown(q quantity) (first total, ok bool) {
	for _, named := range t[q] {
		if named.isKnown() {
			return named, true
		}
	}
	return total{}, false
}

// setEngines sets what engines report of their caches, and whether one is asleep; see newLoad.
func (p *sampleSums) setEngines(l *Load, from, to, sharers int) {
	ofServer, complete, cachingOff := 0, true, true
	for i := from; i < to; i++ {
		sums := p.engine(i)
		l.Asleep = l.Asleep || sums.asleep
		if !sums.hasCache {
			continue
		}
		e := &sums.cache
		l.Engines++
		l.BlockSize = max(l.BlockSize, e.block)
		l.HitAlignment = max(l.HitAlignment, cmp.Or(e.hitAlign, e.attentionBlock))
		l.CacheDtype = max(l.CacheDtype, e.dtype) // the same in all
		l.CacheTokens += e.tokens
		ofServer = max(ofServer, e.serverTokens)
		complete, cachingOff = complete && e.tokens > 0, cachingOff && e.cachingOff
		l.AlignsStates = l.AlignsStates || e.alignsStates
	}
	pool := ofServer / sharers
	if l.AlignsStates || complete && float64(l.CacheTokens) < minFullAttentionShare*float64(pool) {
		l.KeepsCheckpoints, l.PoolTokens = true, pool
	}
	l.PrefixCachingOff = l.Engines > 0 && cachingOff
	if !complete { // a sum without one engine would be too small
		l.CacheTokens = ofServer / sharers
	}
}

// setPrefixCounters sets the prefix counters of l, whose block size is set, from the totals, in tokens.
func (p *sampleSums) setPrefixCounters(l *Load, from *totals) {
	queries, queriesOK := from.firstKnown(prefixQueries)
	hits, hitsOK := from.firstKnown(prefixHits)
	unit := p.unit
	if !queriesOK || !hitsOK {
		queries, queriesOK = from.firstKnown(gpuPrefixQueries)
		hits, hitsOK = from.firstKnown(gpuPrefixHits)
		if unit = p.gpuUnit; unit == unitUnknown {
			unit = unitBlocks // the first versions with this name
		}
	}
	scale := 1.0
	if unit == unitBlocks {
		scale = float64(l.BlockSize)
	}
	host, hostOK := from.firstKnown(hostHits) // in tokens on all versions
	l.HostHits, l.HostHitsKnown = host.sum, hostOK
	allHits := hits.sum*scale + l.HostHits
	if !queriesOK || !hitsOK || scale == 0 || math.IsInf(max(queries.sum*scale, allHits), 0) {
		return
	}
	l.PrefixQueries, l.PrefixHits, l.PrefixKnown = queries.sum*scale, allHits, true
}
