package admin

import (
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/proxy"
	"warmroute/router"
)

const (
	mostRequests = 200 // that are listed, the oldest
	mostHeld     = 10
	// stateLasts is how long an account of the state is good for: however many
	// look, it is made a few times a second at most.
	stateLasts = 250 * time.Millisecond
)

// State is what operators see of a running proxy: nothing of what is asked or
// answered, and no key.
type State struct {
	Version  string         `json:"version"`
	Policy   string         `json:"policy"`
	Now      time.Time      `json:"now"`
	Uptime   number         `json:"uptime_s"`
	Recent   recentState    `json:"recent"`
	Series   seriesState    `json:"series"`
	Backends []backendState `json:"backends"`
	Models   modelsState    `json:"models"`
	Queue    queueState     `json:"queue"`
	Requests requestsState  `json:"requests"`
	// Decisions are the last ones, newest first.
	Decisions []decisionState `json:"decisions"`
}

// recentState is the last half minute.
type recentState struct {
	PerSecond number `json:"requests_per_second"` // that ended, refused ones included
	Failed    number `json:"failed_ratio"`        // of them, with an error
	HitRatio  number `json:"hit_ratio"`
	TTFT      number `json:"ttft_p50_s"`
}

type seriesState struct {
	Step     number   `json:"step_s"`
	TTFT     []number `json:"ttft_p50_s"`
	HitRatio []number `json:"hit_ratio"`
}

type backendState struct {
	Name string `json:"name"`
	URL  string `json:"url"`
	// State is that of router.Condition, or stateDrained.
	State  string     `json:"state"`
	Reason string     `json:"reason,omitempty"` // why it is not ready
	Since  *time.Time `json:"since"`            // of the state; null: not known
	// LastReadyFor are models of which no other backend is ready, maxLastReady at most.
	LastReadyFor  []string `json:"last_ready_for,omitempty"`
	Drained       bool     `json:"drained"` // by an operator
	Breaker       string   `json:"breaker"`
	Aborted       int64    `json:"aborted_responses"` // by its engine, since the start
	InFlight      int64    `json:"in_flight"`
	Running       *int     `json:"running"`
	Waiting       *int     `json:"waiting"`
	KVUsage       *number  `json:"kv_usage"`
	IndexBlocks   int      `json:"index_blocks"`
	IndexCapacity int      `json:"index_capacity_blocks"`
	PerSecond     number   `json:"requests_per_second"`
	HitRatio      number   `json:"hit_ratio"`
}

// stateDrained is the state of a backend that an operator drained and that has
// nothing in flight.
const stateDrained = "drained"

type queueState struct {
	Requests int            `json:"requests"`
	Oldest   *number        `json:"oldest_s"` // since the arrival of the one that came first
	First    []requestState `json:"first"`
}

type requestsState struct {
	All    int            `json:"all"`
	Oldest []requestState `json:"oldest"`
}

type requestState struct {
	Handle        string `json:"handle"` // for /api/requests/{handle}/cancel
	RequestID     string `json:"request_id"`
	Phase         string `json:"phase"`
	Stalled       bool   `json:"stalled"` // it waits for a backend that makes no progress
	Endpoint      string `json:"endpoint"`
	Model         string `json:"model,omitempty"`
	Key           string `json:"key,omitempty"`
	Backend       string `json:"backend,omitempty"`
	MatchedTokens int    `json:"matched_tokens"`
	PromptTokens  int    `json:"prompt_tokens"`
	Attempts      int    `json:"attempts"`
	Age           number `json:"age_s"`
}

type decisionState struct {
	Number        uint64    `json:"number"`
	At            time.Time `json:"at"`
	RequestID     string    `json:"request_id"`
	Model         string    `json:"model"`
	Backend       string    `json:"backend"`
	Reason        string    `json:"reason"`
	Sentence      string    `json:"sentence"`
	MatchedTokens int       `json:"matched_tokens"`
	PromptTokens  int       `json:"prompt_tokens"`
	AheadTokens   int       `json:"ahead_tokens"`
	Held          number    `json:"queue_s"`
	Attempt       int       `json:"attempt"`
}

// number is a float64 with as many digits as anybody reads; NaN is null.
type number float64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, math.Round(float64(n)*1e4)/1e4, 'f', -1, 64), nil
}

// account is the last State, as JSON.
type account struct {
	mu   sync.Mutex // guards what follows
	made time.Time
	json []byte
}

// forget makes the next look see what has just been changed.
func (a *account) forget() {
	a.mu.Lock()
	a.made = time.Time{}
	a.mu.Unlock()
}

// state is the State now, or a moment ago. Callers must not change it.
func (h *Handler) state() []byte {
	a := &h.account
	a.mu.Lock()
	defer a.mu.Unlock()
	if now := time.Now(); now.Sub(a.made) >= stateLasts {
		a.json, _ = json.Marshal(h.look(now)) // strings, times and numbers always marshal
		a.made = now
	}
	return a.json
}

func (h *Handler) showState(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(slices.Clone(h.state()), '\n'))
}

func (h *Handler) look(now time.Time) *State {
	pulse := h.proxy.Activity().Stats()
	listed := h.proxy.Activity().Requests(mostRequests, mostHeld)
	f := h.newFleetSnapshot()
	s := &State{
		Version: h.version, Policy: h.router.Policy(), Now: now.UTC(), Uptime: seconds(now.Sub(h.started)),
		Recent:    recentState{number(pulse.PerSecond), number(pulse.Failed), number(pulse.Recent.HitRatio), number(pulse.Recent.TTFT)},
		Series:    seriesState{seconds(proxy.StatsInterval), numbers(pulse.TTFT), numbers(pulse.HitRatio)},
		Models:    models(f),
		Backends:  h.fleet(f, pulse.Backends),
		Queue:     queue(h.router.WaitingRequests(), requests(listed.Queued, f, now)),
		Requests:  requestsState{listed.Total, requests(listed.Oldest, f, now)},
		Decisions: []decisionState{},
	}
	for _, d := range h.proxy.Activity().Decisions() {
		s.Decisions = append(s.Decisions, decisionState{
			d.Number, d.At.UTC(), d.RequestID, d.Model, d.Backend, d.Reason, d.Explanation(),
			d.MatchedTokens, d.PromptTokens, d.AheadTokens, seconds(d.QueueTime), d.Attempt,
		})
	}
	return s
}

// queue shows how many wait for a backend, and which came first. Among first may be
// some that ask for one this moment and will not wait.
func queue(held int, first []requestState) queueState {
	q := queueState{Requests: held, First: first[:min(held, len(first))]}
	if len(q.First) > 0 {
		q.Oldest = &q.First[0].Age
	}
	return q
}

// fleet shows the backends.
func (h *Handler) fleet(f *fleetSnapshot, recent map[*backends.Backend]proxy.Recent) []backendState {
	parts, _ := h.router.IndexStats()
	out := []backendState{}
	for _, b := range f.backends {
		breaker, _ := h.router.Breaker(b)
		c := f.conditions[b]
		s := backendState{
			Name: b.Name, URL: b.URL.Redacted(), State: string(c.State), Reason: c.Reason, Since: timeOrNull(c.Since), Drained: b.Drained(), LastReadyFor: f.lastReadyFor[b],
			Breaker: breakerNames[breaker], Aborted: b.Aborted.Load(), InFlight: b.InFlight.Load(), HitRatio: number(math.NaN()),
		}
		if r, ok := recent[b]; ok {
			s.PerSecond, s.HitRatio = number(r.PerSecond), number(r.HitRatio)
		}
		if b.Slot < len(parts) && parts[b.Slot].Backend == b {
			s.IndexBlocks, s.IndexCapacity = parts[b.Slot].Blocks, parts[b.Slot].Capacity
		}
		if l := b.Load(); l != nil && l.QueuesKnown {
			s.Running, s.Waiting = &l.Running, &l.Waiting
		}
		if l := b.Load(); l != nil && l.KVKnown {
			usage := number(l.KVCacheUsage)
			s.KVUsage = &usage
		}
		out = append(out, s)
	}
	return out
}

var breakerNames = [...]string{router.BreakerClosed: "closed", router.BreakerHalfOpen: "half-open", router.BreakerOpen: "open"}

func requests(list []proxy.InFlightRequest, f *fleetSnapshot, now time.Time) []requestState {
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
