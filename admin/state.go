package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/fleet"
	"warmroute/proxy/activity"
	"warmroute/router"
)

const (
	maxRequests       = 200 // that are listed, the oldest
	maxQueuedRequests = 10
	maxModels         = 256 // that are listed
	maxLastReady      = 3   // models that are named for a backend
	maxFailingNames   = 10  // names in DNS that are listed

	// minStateInterval bounds how often the state is computed.
	minStateInterval = 250 * time.Millisecond
	// eventInterval is how often the state is sent to a page, which takes a connection
	// without events for broken after some seconds.
	eventInterval     = time.Second
	eventWriteTimeout = 5 * time.Second
)

// State is the state of a running proxy, without prompts, responses and keys.
type State struct {
	Version   string          `json:"version"`
	Policy    string          `json:"policy"`
	Now       time.Time       `json:"now"`
	Uptime    number          `json:"uptime_seconds"`
	Recent    recentState     `json:"recent"`
	Fleet     fleetState      `json:"fleet"`
	Backends  []backendState  `json:"backends"`
	Models    modelsState     `json:"models"`
	Queue     queueState      `json:"queue"`
	Requests  requestsState   `json:"requests"`
	Decisions []decisionState `json:"decisions"` // the latest first
	Redis     *redisState     `json:"redis"`     // null: this proxy is the only one
}

type redisState struct {
	Connected    bool      `json:"connected"`
	Since        time.Time `json:"since"` // of connected
	Reason       string    `json:"reason,omitempty"`
	Proxies      int       `json:"proxies"` // that are alive, this one included
	PeerRequests int       `json:"peer_requests_in_flight"`
}

func (h *Handler) redisState() *redisState {
	if h.Cluster == nil {
		return nil
	}
	s := h.Cluster()
	return &redisState{s.Connected, s.Since.UTC(), s.Reason, s.Proxies, s.PeerRequests}
}

// recentState describes the last half minute.
type recentState struct {
	PerSecond number `json:"requests_per_second"` // finished, including refused ones
	Failed    number `json:"failed_ratio"`        // share with an error
	HitRatio  number `json:"hit_ratio"`
	Elsewhere number `json:"elsewhere_ratio"` // share of prompt tokens that another backend held
	TTFT50    number `json:"ttft_p50_seconds"`
	TTFT99    number `json:"ttft_p99_seconds"`
}

func newRecentState(r *activity.Recent) recentState {
	return recentState{number(r.PerSecond), number(r.Failed), number(r.HitRatio), number(r.ElsewhereRatio), number(r.TTFT50), number(r.TTFT99)}
}

// fleetState explains why the backends may differ from what the configuration and DNS say now.
type fleetState struct {
	ReloadError  string      `json:"reload_error,omitempty"` // why the last reload was not applied
	FailingNames []nameState `json:"failing_names"`          // up to maxFailingNames
}

// nameState is a name in DNS whose last lookup failed, or that has more addresses than are used.
type nameState struct {
	Name      string `json:"name"`
	Addresses int    `json:"addresses"` // that are used
	Omitted   int    `json:"omitted"`   // addresses beyond dns.max_addresses
	Error     string `json:"error,omitempty"`
}

func newFleetState(reloadError string, names []fleet.Name) fleetState {
	s := fleetState{ReloadError: reloadError, FailingNames: []nameState{}}
	for _, n := range names {
		if (n.Error != "" || n.Omitted > 0) && len(s.FailingNames) < maxFailingNames {
			s.FailingNames = append(s.FailingNames, nameState{n.Name, len(n.Addresses), n.Omitted, n.Error})
		}
	}
	return s
}

type backendState struct {
	Name         string             `json:"name"`
	URL          string             `json:"url"`
	Address      string             `json:"address,omitempty"` // host:port, of a backend that is one address of a name
	Source       string             `json:"source"`            // of backends.Source
	Registration *registrationState `json:"registration,omitempty"`
	Role         string             `json:"role,omitempty"`    // "prefill" or "decode"; absent: both
	Version      string             `json:"version,omitempty"` // of vLLM; absent: unknown
	Server       string             `json:"server,omitempty"`  // of a data-parallel rank: the name of the server
	Rank         *int               `json:"rank,omitempty"`    // its number
	State        string             `json:"state"`             // of router.Condition
	Reason       string             `json:"reason,omitempty"`  // why it is not ready
	Since        *time.Time         `json:"since"`             // of the state; null: unknown
	// LastReadyFor has up to maxLastReady models for which no backend of another server is ready.
	LastReadyFor []string `json:"last_ready_for,omitempty"`
	// MissingEndpoints are the paths that its replica does not serve, by its responses.
	MissingEndpoints []string `json:"missing_endpoints,omitempty"`
	Drained          bool     `json:"drained"`                  // by an operator
	ServerDrained    bool     `json:"server_drained,omitempty"` // with all of its ranks
	Suspended        bool     `json:"suspended"`                // while an operator's pause, sleep or reset is in effect
	Breaker          string   `json:"breaker"`
	Aborted          int64    `json:"aborted_responses"` // by its engine
	InFlight         int64    `json:"in_flight"`
	Running          *int     `json:"running"`
	Waiting          *int     `json:"waiting"`
	KVUsage          *number  `json:"kv_usage"`
	IndexBlocks      int      `json:"index_blocks"`
	IndexCapacity    int      `json:"index_capacity_blocks"`
	KVEvents         *kvState `json:"kv_events,omitempty"` // absent: they are not read
	PerSecond        number   `json:"requests_per_second"`
	HitRatio         number   `json:"hit_ratio"`
}

// registrationState is who added a replica. DELETE /api/backends/{name} with its name removes it, and with it
// all addresses of a name in DNS.
type registrationState struct {
	Name string     `json:"name"`
	By   string     `json:"by"`
	At   *time.Time `json:"at"`
}

// kvState is what a replica has reported by KV events.
type kvState struct {
	KVBlocks  int  `json:"kv_blocks"`
	Confirmed int  `json:"confirmed_blocks"` // of the index
	Complete  bool `json:"complete"`         // all that the replica holds is known
}

type queueState struct {
	Requests int            `json:"requests"`
	Oldest   *number        `json:"oldest_seconds"` // since its arrival
	First    []requestState `json:"first"`
}

type requestsState struct {
	All    int            `json:"all"`
	Oldest []requestState `json:"oldest"`
}

type requestState struct {
	Handle          string `json:"handle"` // for /api/requests/{handle}/cancel
	RequestID       string `json:"request_id"`
	Phase           string `json:"phase"`
	Stalled         bool   `json:"stalled"` // its backend makes no progress
	Endpoint        string `json:"endpoint"`
	Model           string `json:"model,omitempty"`
	Key             string `json:"key,omitempty"`
	Backend         string `json:"backend,omitempty"`
	PredictedTokens int    `json:"predicted_tokens"`
	PromptTokens    int    `json:"prompt_tokens"`
	Attempts        int    `json:"attempts"`
	Age             number `json:"age_seconds"`
}

type decisionState struct {
	Number          uint64    `json:"number"`
	At              time.Time `json:"at"`
	RequestID       string    `json:"request_id"`
	Model           string    `json:"model"`
	Backend         string    `json:"backend"`
	Reason          string    `json:"reason"`
	Sentence        string    `json:"sentence"`
	PredictedTokens int       `json:"predicted_tokens"`
	PromptTokens    int       `json:"prompt_tokens"`
	AheadTokens     int       `json:"ahead_tokens"`
	QueueTime       number    `json:"queue_seconds"`
	Attempt         int       `json:"attempt"`
}

type modelsState struct {
	All     int `json:"all"`
	Unready int `json:"unready"` // without a ready backend
	// Listed has up to maxModels models: unready ones, then base models, then adapters.
	Listed []modelState `json:"listed"`
}

type modelState struct {
	ID       string     `json:"id"`
	Backends int        `json:"backends"` // that list it
	Ready    int        `json:"ready"`
	Reason   string     `json:"reason,omitempty"` // why none is ready
	Since    *time.Time `json:"since"`            // none is ready; null: one is, or unknown

	Recent *recentState `json:"recent"` // null: no request
	Queued int          `json:"queued"` // requests, up to 10 s ago

	adapter bool
}

// number is a float64 that is rounded to four digits in JSON; NaN is null.
type number float64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, math.Round(float64(n)*1e4)/1e4, 'f', -1, 64), nil
}

type stateCache struct {
	mu         sync.Mutex // guards what follows
	computedAt time.Time
	json       []byte
}

// invalidate makes the next state show what has just been changed.
func (c *stateCache) invalidate() {
	c.mu.Lock()
	c.computedAt = time.Time{}
	c.mu.Unlock()
}

// stateJSON returns the state, at most minStateInterval old. It must not be modified.
func (h *Handler) stateJSON() []byte {
	c := &h.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.computedAt) >= minStateInterval {
		c.json, _ = json.Marshal(h.computeState(now)) // strings, times and numbers always marshal
		c.computedAt = now
	}
	return c.json
}

func (h *Handler) serveState(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(slices.Clone(h.stateJSON()), '\n'))
}

// streamState sends the state as server-sent events until the client disconnects or
// stops reading, the token changes, or EndEventStreams is called.
func (h *Handler) streamState(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	ticker := time.NewTicker(eventInterval)
	defer ticker.Stop()
	token := h.token.Load()
	for h.token.Load() == token {
		if !sendEvent(w, "state", h.stateJSON()) {
			return
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return
		case <-h.streamsEnded:
			sendEvent(w, "end", []byte("{}"))
			return
		}
	}
}

// sendEvent writes one event with one line of data, and reports whether that succeeded.
func sendEvent(w http.ResponseWriter, event string, data []byte) (ok bool) {
	c := http.NewResponseController(w)
	_ = c.SetWriteDeadline(time.Now().Add(eventWriteTimeout)) // fails if the connection has no deadlines
	for _, part := range [][]byte{[]byte("event: " + event + "\ndata: "), data, []byte("\n\n")} {
		if _, err := w.Write(part); err != nil {
			return false
		}
	}
	return c.Flush() == nil
}

// EndEventStreams ends the streams of events, so that a shutdown does not wait for them.
// Later streams end after their first event. It may be called more than once.
func (h *Handler) EndEventStreams() { h.endStreamsOnce.Do(func() { close(h.streamsEnded) }) }

func (h *Handler) computeState(now time.Time) *State {
	stats := h.Proxy.Activity().Stats()
	listed := h.Proxy.Activity().OldestRequests(maxRequests, maxQueuedRequests)
	f := h.newFleetSnapshot()
	s := &State{
		Version: h.Version, Policy: h.Router.Policy(), Now: now.UTC(), Uptime: seconds(now.Sub(h.started)),
		Recent:    newRecentState(&stats.Recent),
		Fleet:     newFleetState(h.Fleet.ReloadError(), h.Fleet.Names()),
		Models:    modelStates(f, stats.Models),
		Backends:  h.backendStates(f, stats.Backends, now),
		Queue:     newQueueState(h.Router.CountWaiting(), requestStates(listed.Queued, f, now)),
		Requests:  requestsState{listed.Total, requestStates(listed.Oldest, f, now)},
		Decisions: []decisionState{},
		Redis:     h.redisState(),
	}
	for _, d := range h.Proxy.Activity().Decisions() {
		s.Decisions = append(s.Decisions, decisionState{
			d.Number, d.At.UTC(), d.RequestID, d.Model, d.Backend, d.Reason, d.Explanation(),
			d.MatchedTokens, d.PromptTokens, d.AheadTokens, seconds(d.QueueTime), d.Attempt,
		})
	}
	return s
}

// newQueueState returns the state of the admission queue. first may have requests that
// are only about to enter it.
func newQueueState(queued int, first []requestState) queueState {
	q := queueState{Requests: queued, First: first[:min(queued, len(first))]}
	if len(q.First) > 0 {
		q.Oldest = &q.First[0].Age
	}
	return q
}

func (h *Handler) backendStates(f *fleetSnapshot, recent map[*backends.Backend]activity.Recent, now time.Time) []backendState {
	parts, _ := h.Router.IndexStats()
	out, registrations := []backendState{}, h.registrations()
	for _, b := range f.backends {
		c := f.conditions[b]
		s := backendState{
			Name: b.Name, URL: b.URL.Redacted(), Address: b.Addr, Source: b.Options().Source.String(), Role: roleName(b), Version: b.Version(),
			State: string(c.State), Reason: c.Reason, Since: timeOrNull(c.Since), Drained: b.Drained(),
			Suspended: b.Suspension() != backends.NotSuspended, LastReadyFor: f.lastReadyFor[b], MissingEndpoints: h.Proxy.MissingEndpoints(b, now),
			Breaker: breakerNames[h.Router.Status(b).Breaker], Aborted: b.Aborted.Load(), InFlight: b.InFlight.Load(), HitRatio: number(math.NaN()),
		}
		if rank, ok := b.Engine(); ok {
			s.Server, s.Rank, s.ServerDrained = b.Server().Name, &rank, b.Server().Drained()
		}
		if r, ok := findRegistration(b, registrations); ok {
			s.Registration = &registrationState{r.Backend.Name, r.By, timeOrNull(r.At)}
		}
		if r, ok := recent[b]; ok {
			s.PerSecond, s.HitRatio = number(r.PerSecond), number(r.HitRatio)
		}
		if b.Slot < len(parts) && parts[b.Slot].Backend == b {
			s.IndexBlocks, s.IndexCapacity = parts[b.Slot].Blocks, parts[b.Slot].Capacity
			if kv := parts[b.Slot].KV; kv != nil {
				s.KVEvents = &kvState{kv.KVBlocks, kv.Confirmed, kv.Complete}
			}
		}
		l := b.Load()
		if l != nil && l.QueuesKnown {
			s.Running, s.Waiting = &l.Running, &l.Waiting
		}
		if l != nil && l.KVKnown {
			usage := number(l.KVCacheUsage)
			s.KVUsage = &usage
		}
		out = append(out, s)
	}
	return out
}

var breakerNames = [...]string{router.BreakerClosed: "closed", router.BreakerHalfOpen: "half-open", router.BreakerOpen: "open"}

func requestStates(list []activity.InFlightRequest, f *fleetSnapshot, now time.Time) []requestState {
	out := []requestState{}
	for _, r := range list {
		out = append(out, requestState{
			r.Handle, r.RequestID, r.Phase.String(), r.Backend != "" && f.stalled[r.Backend], r.Endpoint, r.Model, r.Key, r.Backend,
			r.MatchedTokens, r.PromptTokens, r.Attempts, seconds(now.Sub(r.Arrived)),
		})
	}
	return out
}

func seconds(d time.Duration) number { return number(d.Seconds()) }

func numbers(list []float64) []number {
	out := make([]number, len(list))
	for i, f := range list {
		out[i] = number(f)
	}
	return out
}

// fleetSnapshot is the fleet at one moment, so that the parts of a State are consistent.
type fleetSnapshot struct {
	backends     []*backends.Backend // without removed ones whose name was reused
	catalog      *backends.Catalog
	conditions   map[*backends.Backend]router.Condition // also of those not in backends
	stalled      map[string]bool                        // by name
	lastReadyFor map[*backends.Backend][]string
}

func (h *Handler) newFleetSnapshot() *fleetSnapshot {
	f := &fleetSnapshot{
		catalog:      h.Registry.Catalog(),
		conditions:   map[*backends.Backend]router.Condition{},
		stalled:      map[string]bool{},
		lastReadyFor: map[*backends.Backend][]string{},
	}
	for _, b := range h.Registry.All() {
		c := h.Router.Status(b).Condition
		f.conditions[b] = c
		if h.Registry.Find(b.Name) == b {
			f.backends = append(f.backends, b)
			f.stalled[b.Name] = c.State == router.Stalled
		}
	}
	for _, m := range f.catalog.Models {
		entry, _ := f.catalog.Find(m.ID)
		ready := f.filterReady(entry.Backends)
		if len(ready) == 0 || slices.ContainsFunc(ready, func(b *backends.Backend) bool { return b.Server() != ready[0].Server() }) {
			continue
		}
		for _, b := range ready {
			if len(f.lastReadyFor[b]) < maxLastReady {
				f.lastReadyFor[b] = append(f.lastReadyFor[b], m.ID)
			}
		}
	}
	return f
}

func (f *fleetSnapshot) filterReady(list []*backends.Backend) (ready []*backends.Backend) {
	for _, b := range list {
		if f.conditions[b].State == router.Ready {
			ready = append(ready, b)
		}
	}
	return ready
}

func modelStates(f *fleetSnapshot, recent map[string]activity.Recent) modelsState {
	s := modelsState{All: len(f.catalog.Models), Listed: []modelState{}}
	for _, m := range f.catalog.Models {
		entry, _ := f.catalog.Find(m.ID)
		one := modelState{ID: m.ID, Backends: len(entry.Backends), Ready: len(f.filterReady(entry.Backends)), adapter: entry.Adapter}
		if one.Ready == 0 {
			s.Unready++
			one.Reason, one.Since = f.whyUnready(entry.Backends)
		}
		if r, ok := recent[m.ID]; ok {
			figures := newRecentState(&r)
			one.Recent, one.Queued = &figures, r.Queued
		}
		s.Listed = append(s.Listed, one)
	}
	slices.SortStableFunc(s.Listed, func(a, b modelState) int {
		return cmp.Or(compareBool(a.Ready > 0, b.Ready > 0), compareBool(a.adapter, b.adapter), cmp.Compare(a.ID, b.ID))
	})
	s.Listed = s.Listed[:min(len(s.Listed), maxModels)]
	return s
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// whyUnready returns why none of the backends is ready, and since when.
func (f *fleetSnapshot) whyUnready(list []*backends.Backend) (reason string, since *time.Time) {
	var reasons []string
	for _, b := range list {
		c := f.conditions[b]
		if len(reasons) < maxLastReady {
			reasons = append(reasons, fmt.Sprintf("%s is %s", b.Name, c.State))
		}
		if at := timeOrNull(c.Since); at != nil && (since == nil || at.After(*since)) {
			since = at
		}
	}
	if more := len(list) - len(reasons); more > 0 {
		reasons = append(reasons, fmt.Sprintf("%d more are not ready", more))
	}
	return strings.Join(reasons, ", "), since
}

func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
