package replay

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/prompt"
)

// A workload has at least minWorldRequests, and minReplicaRequests for each replica: a large
// fleet would finish fewer before its caches are warm.
const (
	minWorldRequests   = 2000
	minReplicaRequests = 80
)

// World is a fleet, a workload and a load, drawn at random: routing policies are compared in
// many of them, none of which anybody chose.
type World struct {
	Number     int
	Dimensions []Dimension
	Scenario   Scenario // without a policy, a queue and a seed
	Load       float64  // of an open loop; 0: a closed loop, which has none
}

// Dimension is one property of a world, in words.
type Dimension struct{ Name, Value string }

// world is a World that is being drawn.
type world struct {
	World
	*rand.Rand
	kind string // of its workload
}

// DrawWorld returns world number of a seed. The same arguments give the same world. trace,
// which may be nil, is one of the workloads.
func DrawWorld(seed uint64, number int, trace *Trace) (World, error) {
	w := newWorld(seed, number)
	w.drawKind(trace)
	return w.drawOfKind(trace)
}

// DrawArrivalWorld returns world number of a seed, of those that differ in how requests arrive: with exponential gaps, from
// clients that send in bursts, as calls of agents in the turns of a person, or as calls of agents that take turns in a
// session. The same arguments give the same world. They are apart from those of DrawWorld, whose figures compare with
// earlier ones.
func DrawArrivalWorld(seed uint64, number int) (World, error) {
	w := newWorld(seed, number)
	w.drawArrivals()
	return w.drawOfKind(nil)
}

func newWorld(seed uint64, number int) *world {
	return &world{World: World{Number: number}, Rand: rand.New(rand.NewPCG(seed, uint64(number)))}
}

// drawOfKind draws all but the kind of workload.
func (w *world) drawOfKind(trace *Trace) (World, error) {
	w.drawFleet()
	w.drawDevices()
	w.drawEngine()
	w.drawRanks()
	models := w.drawModels()
	workload, load := w.drawWorkload(trace)
	w.drawClients()
	w.Scenario.Workload = drawnWorkload{base: workload, models: models, scenario: w.Scenario}
	if err := w.drawKV(); err != nil {
		return World{}, err
	}
	w.Load = load
	w.Scenario.Workload = drawnWorkload{base: workload, load: load, models: models, scenario: w.Scenario}
	return w.World, nil
}

func (w *world) add(name, value string) {
	w.Dimensions = append(w.Dimensions, Dimension{name, value})
}

// between draws from a logarithmic distribution.
func (w *world) between(low, high float64) float64 {
	return low * math.Exp(w.Float64()*math.Log(high/low))
}

// chance reports true with a probability.
func (w *world) chance(probability float64) bool { return w.Float64() < probability }

// drawKind draws the kind of workload: in a third of the worlds agents with long contexts.
func (w *world) drawKind(trace *Trace) {
	kinds := []string{"agentic", "rollouts", "shared", "pinned", "documents", "hot", "chats"}
	if trace != nil {
		kinds = append(kinds, "trace")
	}
	w.kind = kinds[w.IntN(len(kinds))]
	if w.chance(1.0 / 3) {
		w.kind = "agents, open"
		if w.chance(0.5) {
			w.kind = "agents, closed"
		}
	}
	w.add("workload", w.kind)
}

// drawArrivals draws the kind of arrivals, and a workload with these.
func (w *world) drawArrivals() {
	arrivals := []string{"exponential", "bursts", "turns of agents", "alternating agents"}
	w.kind = arrivals[w.IntN(len(arrivals))]
	w.add("arrivals", w.kind)
	if w.kind == "exponential" {
		kinds := []string{"shared", "documents", "hot", "chats"}
		w.kind = kinds[w.IntN(len(kinds))]
		w.add("workload", w.kind)
	}
}

// hasCodingAgents reports whether the requests are those of coding agents, which take long to simulate.
func (w *world) hasCodingAgents() bool { return w.kind == "agents, open" || w.kind == "agents, closed" }

// hasSlowClients reports whether the rates of clients change, or people pause, for minutes: the world has to last longer,
// with as many requests as another.
func (w *world) hasSlowClients() bool {
	return slices.Contains([]string{"bursts", "turns of agents", "alternating agents"}, w.kind)
}

// drawFleet draws the number of replicas and their speeds. It is small where requests take long to simulate or are few a
// second.
func (w *world) drawFleet() {
	s := &w.Scenario
	s.Backends = int(w.between(2, 65))
	switch {
	case w.hasCodingAgents():
		s.Backends = int(w.between(2, 25))
	case w.hasSlowClients():
		s.Backends = int(w.between(2, 13))
	}
	switch {
	case s.Backends <= 4:
		w.add("fleet", "2-4")
	case s.Backends <= 16:
		w.add("fleet", "5-16")
	default:
		w.add("fleet", "17-64")
	}
	speeds := "equal"
	if w.chance(0.3) {
		speeds = "mixed"
		for range s.Backends {
			s.Speeds = append(s.Speeds, 0.3+0.7*w.Float64())
		}
	}
	w.add("speeds", speeds)
}

// drawDevices draws which replicas share a GPU, and whether the router is told of it.
func (w *world) drawDevices() {
	s := &w.Scenario
	if !w.chance(0.15) {
		w.add("devices", "own")
		return
	}
	each := 2 + w.IntN(3)
	for i := range s.Backends {
		s.Devices = append(s.Devices, i/each)
	}
	if s.DevicesUnknown = w.chance(1.0 / 3); s.DevicesUnknown {
		w.add("devices", "shared, unknown")
	} else {
		w.add("devices", "shared, known")
	}
}

// drawEngine draws how fast a replica is: as some hardware is, or not like any.
func (w *world) drawEngine() {
	e := &w.Scenario.Engine
	if known := publishedHardware(); w.chance(0.75) {
		h := known[w.IntN(len(known))]
		*e = h.times
		w.add("hardware", h.name)
	} else {
		w.drawStepTimes()
		w.add("hardware", "any")
	}
	e.StepTokens = int(w.between(2048, 16384))
	e.MaxSeqs = int(w.between(64, 512))
	w.drawDeviations()
	switch {
	case e.PrefillRate < 5000:
		w.add("prefill", "1k-5k/s")
	case e.PrefillRate < 20_000:
		w.add("prefill", "5k-20k/s")
	default:
		w.add("prefill", "20k-100k/s")
	}
	if e.StepTokens < 6000 {
		w.add("step", "2k-6k")
	} else {
		w.add("step", "6k-16k")
	}
	if e.QuadraticDepth == engine.LinearPrefill {
		w.add("attention", "linear")
	} else {
		w.add("attention", "quadratic")
	}
}

// drawStepTimes draws the times of a step. An engine that prefills slowly decodes slowly, too.
func (w *world) drawStepTimes() {
	e := &w.Scenario.Engine
	e.PrefillRate = w.between(1000, 100_000)
	slowness := math.Sqrt(8000/e.PrefillRate) * w.between(0.5, 2)
	e.StepTime = time.Duration(w.between(4e6, 25e6))
	e.DecodeTime = time.Duration(40e3 * slowness)
	e.ContextTime = max(1, time.Duration(24*slowness))
	e.QuadraticDepth = engine.LinearPrefill
	if w.chance(0.5) {
		e.QuadraticDepth = w.between(0.5e-5, 4e-5)
	}
}

// drawDeviations draws what a model of a step by its tokens and sequences lacks, or knows only roughly.
func (w *world) drawDeviations() {
	e := &w.Scenario.Engine
	e.PromptTokenTime = engine.NoAPIServer
	if w.chance(0.75) {
		e.PromptTokenTime = time.Duration(w.between(500, 4000))
	}
	e.Jitter = 0.3 * w.Float64()
	if w.chance(0.6) {
		e.DecodeInterference = w.between(3e-4, 3e-3)
	}
	if e.QuadraticDepth != engine.LinearPrefill && w.chance(0.5) {
		e.CachedDepth = e.QuadraticDepth * w.between(0.5, 2)
	}
	e.Seed = w.Uint64()
}

// drawRanks draws how many data-parallel engines each replica has.
func (w *world) drawRanks() {
	if !w.chance(0.15) || w.Scenario.Devices != nil {
		w.add("ranks", "one")
		return
	}
	w.Scenario.Ranks = 2 + w.IntN(3)
	w.add("ranks", "2-4")
}

// drawModels draws which models the replicas serve, and returns how many there are.
func (w *world) drawModels() (models int) {
	s := &w.Scenario
	switch {
	case w.chance(0.7):
		w.add("models", "one")
		return 1
	case s.Backends < 6 || w.chance(0.3):
		w.add("models", "three, shared")
		return 3
	}
	w.add("models", "three, separate")
	sizes := []float64{1, w.between(0.2, 0.7), w.between(1.5, 4)}
	for len(s.Speeds) < s.Backends {
		s.Speeds = append(s.Speeds, 1)
	}
	for i := range s.Backends {
		s.ModelOf = append(s.ModelOf, i%3)
		s.Speeds[i] *= sizes[i%3]
	}
	return 3
}

// drawClients draws what clients send.
func (w *world) drawClients() {
	s := &w.Scenario
	switch share := w.Float64(); {
	case share < 0.4:
		w.add("streaming", "all")
	case share < 0.8:
		s.NonStreaming = w.Float64()
		w.add("streaming", "some")
	default:
		s.NonStreaming = 1
		w.add("streaming", "none")
	}
	s.BytesPerToken = 2 + 4*w.Float64()
	s.TextSpread = 0.3 * w.Float64()
	if s.BytesPerToken < 3.5 {
		w.add("bytes/token", "2-3.5")
	} else {
		w.add("bytes/token", "3.5-6")
	}
}

// drawWorkload draws a workload and its load, which is 0 for a closed loop.
func (w *world) drawWorkload(trace *Trace) (workload Workload, load float64) {
	load = 0.5 + 0.8*w.Float64()
	n := float64(max(minWorldRequests, minReplicaRequests*w.Scenario.Backends)) * (1 + 0.2*w.Float64())
	seconds := func(rate float64) time.Duration { return time.Duration(n / rate * float64(time.Second)) }
	const (
		rate     = 10 // requests a second, before arrivals are scaled to the load
		maxTurns = 40 // of a conversation of coding agents, whose requests take long to simulate
		turns    = 19 // mean
	)
	switch w.kind {
	case "agents, open":
		load /= 2.5 // on average: it is twice as high while most conversations are open
		w.addLoad(load)
		const span = 20 * time.Minute
		requests := load * w.codingAgentRate() * span.Seconds()
		return CodingAgents{Conversations: int(min(max(40, requests/turns), 160)), BeginWithin: span, MaxTurns: maxTurns}, load
	case "agents, closed":
		const pause = 33 // seconds, mean
		open := int(min(max(2, load*w.codingAgentRate()*pause), 120))
		return CodingAgents{Conversations: max(40, 3*open/2), Concurrency: open, MaxTurns: maxTurns}, 0
	case "turns of agents", "alternating agents":
		w.addLoad(load)
		agents := AgentTurns{Agents: 1}
		if w.kind == "alternating agents" {
			agents.Agents = 3 + w.IntN(4)
		}
		const span = 20 * time.Minute
		sessions := load * w.sessionRate(agents)
		agents.Sessions = int(min(max(40, sessions*span.Seconds()), 200))
		agents.BeginWithin = time.Duration(float64(agents.Sessions) / sessions * float64(time.Second))
		return agents, 0 // of its arrivals, which follow the responses
	case "bursts":
		w.addLoad(load)
		lasts := 30*time.Minute + time.Duration(w.Float64()*float64(30*time.Minute)) // before it is scaled to the load
		return Clients{Clients: int(w.between(5, 100)), PromptTokens: w.between(500, 8000), OwnTokens: w.between(500, 10_000),
			Output: w.between(100, 1500), Rate: n / lasts.Seconds(), For: lasts}, load
	case "agentic":
		open := max(2, int(w.between(1, 12)*float64(w.Scenario.Backends)))
		return Agentic{Concurrency: open, Sessions: max(250, open)}, 0
	case "rollouts":
		return Rollouts(), 0
	case "pinned":
		sessions := max(4, int(w.between(2, 10)*float64(w.Scenario.Backends)))
		return Conversations{
			Sessions: sessions, Groups: sessions, PromptTokens: int(w.between(2000, 16000)), MeanTurns: max(8, 1.3*n/float64(sessions)),
			Said: w.between(100, 600), Output: w.between(50, 400), OutputSigma: 0.5, Pause: time.Duration(w.between(0.1e9, 10e9)),
		}, 0
	case "shared":
		w.addLoad(load)
		return SharedPrompts{Prompts: 150, PromptTokens: 6144, Zipf: 0, OwnTokens: 1200, Output: w.between(50, 500), Rate: rate,
			For: seconds(rate)}, load
	case "documents":
		w.addLoad(load)
		return Documents{Load: float64(rate) * documentTokens / (float64(w.Scenario.Backends) * nominalRate), For: seconds(rate)}, load
	case "hot":
		w.addLoad(load)
		hot := HotPrompts(1+w.IntN(8), rate)
		hot.For = seconds(rate)
		return hot, load
	case "chats":
		w.addLoad(load)
		chats := ChatsOnSmallCaches()
		chats.Rate, chats.For, chats.KVTokens = rate, seconds(rate), 0
		return chats, load
	}
	w.addLoad(load)
	first := w.IntN(max(1, len(trace.Requests)-int(n)))
	last := min(len(trace.Requests), first+int(n))
	return Traced{Trace: &Trace{BlockTokens: trace.BlockTokens, Requests: slices.Clone(trace.Requests[first:last])}}, load
}

// codingAgentRate returns about how many requests of coding agents a second are a load of 1: most have a prompt of
// 75,000 tokens, of which 2,000 are computed, and an output of 400. Ten run at once on a replica.
func (w *world) codingAgentRate() float64 {
	e := w.Scenario.Engine.WithDefaults()
	token := e.StepTime.Seconds()/10 + e.DecodeTime.Seconds() + 75_000*e.ContextTime.Seconds()
	fleet := drawnWorkload{scenario: w.Scenario}
	return fleet.totalSpeed() / (e.PrefillSeconds(73_000, 0, 2000) + 400*token)
}

// sessionRate returns about how many sessions a second are a load of 1, if ten calls run at once on a replica.
func (w *world) sessionRate(agents AgentTurns) float64 {
	const sessions, seed = 300, 1
	calls, tokens := Requests{BlockTokens: generatedBlockTokens}, 0
	for i := range sessions {
		s := agents.newSession(i, rand.New(rand.NewPCG(seed, uint64(i))))
		for range s.calls {
			j := s.nextJob(0)
			tokens += j.Prompt + j.Output
			calls.Open = append(calls.Open, j)
		}
	}
	fleet := drawnWorkload{scenario: w.Scenario}
	fleet.scenario.KVTokens = 10 * tokens / len(calls.Open)
	return sessions * fleet.totalSpeed() / fleet.busySeconds(&calls)
}

func (w *world) addLoad(load float64) {
	switch {
	case load < 0.5:
		w.add("load", "0.2-0.5")
	case load < 0.75:
		w.add("load", "0.5-0.75")
	case load <= 1:
		w.add("load", "0.75-1")
	default:
		w.add("load", "1-1.3")
	}
}

// drawKV draws the size of the KV caches in relation to the workload.
func (w *world) drawKV() error {
	s := &w.Scenario
	var m workloadSize
	for seed := range uint64(worldSeeds) {
		requests, err := s.Workload.Requests(s.Backends, seed+1)
		if err != nil {
			return err
		}
		m.add(requests)
	}
	working := m.tokens / float64(s.Backends*max(1, s.Ranks)) // for each engine
	var tokens float64
	switch draw := w.Float64(); {
	case w.kind == "pinned":
		tokens = max(working/1.3, 1.2*m.longest) // what an engine's sessions need is 1.3 times its cache
		w.add("KV", "1/1.3")
	case draw < 0.4:
		tokens = max(working*(1.5+2*w.Float64()), 4*m.longest)
		w.add("KV", "ample")
	case draw < 0.75:
		tokens = max(working*(0.3+0.6*w.Float64()), 2*m.longest, 8*m.mean)
		w.add("KV", "tight")
	default:
		tokens = max((4+8*w.Float64())*m.mean, 1.2*m.longest)
		w.add("KV", "bottleneck")
	}
	s.KVTokens = max(int(tokens), 8192)
	return nil
}

// workloadSize is what a workload needs of a fleet, with any of its seeds.
type workloadSize struct {
	requests      float64
	tokens        float64 // in distinct blocks, with the seed that has the most
	mean, longest float64 // tokens of a request, prompt and output
}

// add goes through all requests of a seed, which it uses up.
func (m *workloadSize) add(r *Requests) {
	distinct := map[engine.BlockHash]bool{}
	for j := range r.all() {
		m.requests++
		tokens := float64(j.Prompt + j.Output)
		m.mean += (tokens - m.mean) / m.requests
		m.longest = max(m.longest, tokens)
		for _, b := range j.cache {
			distinct[b] = true
		}
	}
	m.tokens = max(m.tokens, float64(len(distinct)*r.BlockTokens))
}

// all yields all requests, those of a closed loop as if each ended at once.
func (r *Requests) all() func(yield func(*Job) bool) {
	return func(yield func(*Job) bool) {
		for queue := slices.Clone(r.Open); len(queue) > 0; {
			j := queue[0]
			queue = queue[1:]
			if !yield(j) {
				return
			}
			if r.Next != nil {
				if next := r.Next(j, j.At); next != nil {
					queue = append(queue, next)
				}
			}
		}
	}
}

// drawnWorkload is a workload with its load and models. A load of 1 is what the fleet can
// do in the time of the arrivals if one unlimited cache serves all: the prefill of what is
// not cached then, and the share of the steps that each generated token takes, if as many
// requests run as the KV cache has room for.
type drawnWorkload struct {
	base     Workload
	load     float64 // 0: arrivals stay as they are
	models   int
	scenario Scenario // its fleet
}

// Requests generates the requests of the base, for the models and at the load.
func (w drawnWorkload) Requests(backends int, seed uint64) (*Requests, error) {
	r, err := w.base.Requests(backends, seed)
	if err != nil {
		return nil, err
	}
	if w.models > 1 {
		r.divideByModel(w.modelShares())
	}
	if w.load == 0 {
		return r, nil
	}
	first, last := r.Open[0].At, r.Open[len(r.Open)-1].At
	if last == first {
		return nil, errors.New("all requests arrive at once: they have no load")
	}
	factor := w.busySeconds(r) / (w.load * w.totalSpeed() * (last - first).Seconds())
	for i, j := range r.Open {
		scaled := *j
		scaled.At = time.Duration(float64(j.At-first) * factor)
		r.Open[i] = &scaled
	}
	return r, nil
}

// speed returns the speed of a replica, all of its ranks together, beside those that share its device.
func (w *drawnWorkload) speed(backend int) float64 {
	speed := float64(max(1, w.scenario.Ranks))
	if backend < len(w.scenario.Speeds) {
		speed *= w.scenario.Speeds[backend]
	}
	if w.scenario.Devices != nil {
		speed /= float64(len(groupByDevice(w.scenario.Devices)[backend]))
	}
	return speed
}

func (w *drawnWorkload) totalSpeed() float64 {
	sum := 0.0
	for i := range w.scenario.Backends {
		sum += w.speed(i)
	}
	return sum
}

// modelShares returns the share of the requests that each model gets: that of its replicas
// in the speed of the fleet.
func (w *drawnWorkload) modelShares() []float64 {
	shares := make([]float64, w.models)
	for i := range w.scenario.Backends {
		if w.scenario.ModelOf != nil {
			shares[w.scenario.ModelOf[i]] += w.speed(i) / w.totalSpeed()
		}
	}
	if w.scenario.ModelOf == nil {
		for m := range shares {
			shares[m] = 1 / float64(w.models)
		}
	}
	return shares
}

// busySeconds returns how long one replica of speed 1 would take for all requests of an open
// loop with an unlimited cache.
func (w *drawnWorkload) busySeconds(r *Requests) float64 {
	e := w.scenario.Engine.WithDefaults()
	tokens := 0.0
	for _, j := range r.Open {
		tokens += float64(j.Prompt+j.Output) / float64(len(r.Open))
	}
	running := min(max(1, float64(w.scenario.KVTokens)/tokens), float64(e.MaxSeqs))
	cached := map[engine.BlockHash]bool{}
	seconds := 0.0
	for _, j := range r.Open {
		hits := 0
		for hits < len(j.Blocks) && cached[j.cache[hits]] {
			hits++
		}
		for _, b := range j.cache {
			cached[b] = true
		}
		hit := float64(hits * r.BlockTokens)
		uncached := float64(j.Prompt) - hit
		seconds += e.PrefillSeconds(hit, 0, uncached)
		context := float64(j.Prompt) + float64(j.Output)/2
		seconds += float64(j.Output) * (e.StepTime.Seconds()/running + e.DecodeTime.Seconds() + context*e.ContextTime.Seconds())
	}
	return seconds
}

// divideByModel divides the requests among models by shares, whole sessions at a time.
// Models share no blocks.
func (r *Requests) divideByModel(shares []float64) {
	assign := func(j *Job) *Job {
		at, model := float64(mixBits(cmp.Or(j.Conversation, j.PromptKey)^0x9e37)>>11)/(1<<53), 0
		for model < len(shares)-1 && at >= shares[model] {
			at -= shares[model]
			model++
		}
		c := *j
		c.Model = model
		c.Blocks, c.Reply, c.cache = slices.Clone(j.Blocks), slices.Clone(j.Reply), slices.Clone(j.cache)
		seed := mixBits(uint64(model))
		for _, blocks := range [][]prompt.Block{c.Blocks, c.Reply} {
			for i := range blocks {
				blocks[i] ^= prompt.Block(seed)
			}
		}
		for i := range c.cache {
			c.cache[i] ^= engine.BlockHash(seed)
		}
		return &c
	}
	for i, j := range r.Open {
		r.Open[i] = assign(j)
	}
	if next := r.Next; next != nil {
		r.Next = func(ended *Job, now time.Duration) *Job {
			if j := next(ended, now); j != nil {
				return assign(j)
			}
			return nil
		}
	}
}

// String names the world and its properties.
func (w World) String() string {
	name := "world " + strconv.Itoa(w.Number)
	for _, d := range w.Dimensions {
		name += ", " + d.Name + " " + d.Value
	}
	return name
}
