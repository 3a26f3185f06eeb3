package backends

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/vllm"
)

// rank is what a Backend is a part of: one data-parallel engine of a server, or all of them.
type rank struct {
	server        *Backend
	engine        int    // label of the engine in /metrics; wholeServer: all of them
	addressSuffix string // of the server's Address; "" for all engines

	// header is the value of vllm.RankHeader; nil: none is sent, and the server chooses the engine.
	header atomic.Pointer[[]string]
}

const wholeServer = -1

// NewRank returns the backend of one data-parallel engine of a server, by its label in /metrics: it has its own
// account, load, and place in the index, and gets its requests by number, the value of vllm.RankHeader. It shares the
// server's health, models, settings and connections. See SetParts.
func NewRank(server *Backend, engine, number int) *Backend {
	label := strconv.Itoa(engine)
	b := newPart(server, server.Name+"-rank"+label, &rank{server: server, engine: engine, addressSuffix: "#" + label})
	b.SetRankNumber(number)
	return b
}

// NewUndivided returns a backend of all engines of a server, for one that had ranks before.
func NewUndivided(server *Backend) *Backend {
	return newPart(server, server.Name, &rank{server: server, engine: wholeServer})
}

func newPart(server *Backend, name string, r *rank) *Backend {
	b := &Backend{Name: name, URL: server.URL, Addr: server.Addr, rank: r}
	b.condition.server, b.observed.server = &server.condition, &server.observed
	b.options.Store(server.Options())
	return b
}

// Server returns the server of which b is a part, which is the backend that is checked and polled; b if it is not
// a part.
func (b *Backend) Server() *Backend {
	if b.rank != nil {
		return b.rank.server
	}
	return b
}

// Engine returns the label of the engine of which b is the rank, or false if it is none.
func (b *Backend) Engine() (label int, ok bool) {
	if b.rank == nil || b.rank.engine == wholeServer {
		return 0, false
	}
	return b.rank.engine, true
}

// whole returns the server if b stands for all of its engines, else b.
func (b *Backend) whole() *Backend {
	if b.rank != nil && b.rank.engine == wholeServer {
		return b.rank.server
	}
	return b
}

// SetRankNumber changes the value of vllm.RankHeader for a rank.
func (b *Backend) SetRankNumber(number int) {
	b.rank.header.Store(&[]string{strconv.Itoa(number)})
}

// RankHeader returns the value of vllm.RankHeader for requests to b; nil: none is sent.
func (b *Backend) RankHeader() []string {
	if b.rank == nil || b.rank.server.ranksRejected.Load() != nil {
		return nil
	}
	if h := b.rank.header.Load(); h != nil {
		return *h
	}
	return nil
}

// StopSendingRankHeader records that the server of which b is a rank has refused it. Until SetParts its ranks get their requests
// without vllm.RankHeader, so that it refuses none, and the next poll is made soon.
func (b *Backend) StopSendingRankHeader(now time.Time) {
	if server := b.Server(); slices.Contains(server.separateParts(), b) { // else it was sent before a change that is known
		server.ranksRejected.CompareAndSwap(nil, &now)
	}
	b.RequestPoll()
}

// RanksRejectedAt returns when a server first refused a rank since SetParts, or false.
func (b *Backend) RanksRejectedAt() (at time.Time, ok bool) {
	if at := b.ranksRejected.Load(); at != nil {
		return *at, true
	}
	return time.Time{}, false
}

// Parts returns the backends by which a server's requests are routed: its ranks, or itself.
func (b *Backend) Parts() []*Backend {
	if parts := b.separateParts(); len(parts) > 0 {
		return parts
	}
	return []*Backend{b}
}

// separateParts returns the Parts of a server that is not routed as one backend any more; nil: it is.
func (b *Backend) separateParts() []*Backend {
	if parts := b.parts.Load(); parts != nil {
		return *parts
	}
	return nil
}

// SetParts sets the backends to which the requests for b are routed. NewRank and NewUndivided have returned them for b.
// From then on they are in the registry instead of b, which is still checked and polled. Requests to earlier parts
// are sent without vllm.RankHeader. Not safe for concurrent use with itself and SetOptions.
func (b *Backend) SetParts(parts []*Backend) {
	for _, former := range b.separateParts() {
		if !slices.Contains(parts, former) {
			former.rank.header.Store(nil)
		}
	}
	setSharedOptions(parts, b.Options())
	b.parts.Store(&parts)
	b.ranksRejected.Store(nil)
	if b.changed != nil {
		b.changed.Notify()
	}
}

// setSharedOptions gives parts the options of their server. Each rank may have its share of MaxInFlight, and has
// hardware of its own.
func setSharedOptions(parts []*Backend, o *Options) {
	share := *o
	share.MaxInFlight = (o.MaxInFlight + len(parts) - 1) / len(parts)
	if len(parts) > 1 {
		share.Device = ""
	}
	for _, m := range parts {
		m.options.Store(&share)
	}
}

// loadIn returns the part of a server's load that b has: that of its engine, or all; nil: it is not there.
func (b *Backend) loadIn(l *Load) *Load {
	engine, isRank := b.Engine()
	if !isRank {
		return l
	}
	for i := range l.PerEngine {
		if l.PerEngine[i].Engine == engine {
			return &l.PerEngine[i].Load
		}
	}
	return nil
}

// WithParts returns a server and its Parts, itself once.
func (b *Backend) WithParts() []*Backend { return append([]*Backend{b}, b.separateParts()...) }

// CountInFlight returns how many sequences of this proxy are in flight on a backend, or on a server and its ranks.
func (b *Backend) CountInFlight() (n int64) {
	for _, part := range b.WithParts() {
		n += part.InFlight.Load()
	}
	return n
}

// AllIdle reports whether no request of this proxy is in flight on a backend, or on a server and its ranks.
func (b *Backend) AllIdle() bool {
	return !slices.ContainsFunc(b.WithParts(), func(part *Backend) bool { return !part.Idle() })
}

const maxProbeResponseBytes = 64 << 10

// ProbeRanks sends a server a request for a rank that it cannot have, and returns the error with which the server refuses
// the rank. It returns nil without an error if the server did not refuse it, since it ignores the header. It blocks until
// the server responds or ctx is done.
func (b *Backend) ProbeRanks(ctx context.Context) (*vllm.RankError, error) {
	model, known := firstBaseModel(b.Models())
	if !known {
		return nil, fmt.Errorf("probe the ranks of %s: its models are not known yet", b.Name)
	}
	req := fasthttp.AcquireRequest()
	defer fasthttp.ReleaseRequest(req)
	setPost(req, b.URL.JoinPath(vllm.ProbePath), vllm.ProbeBody(model))
	req.Header.Set(vllm.RankHeader, strconv.Itoa(vllm.ProbeRank))
	res, err := b.doBuffered(ctx, req, maxProbeResponseBytes)
	if res == nil {
		return nil, fmt.Errorf("probe the ranks of %s: %w", b.Name, err)
	}
	defer fasthttp.ReleaseResponse(res)
	switch res.StatusCode() {
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		return nil, fmt.Errorf("probe the ranks of %s: it responded with status %d", b.Name, res.StatusCode())
	}
	if e, ok := vllm.ParseRankError(res.StatusCode(), res.Body()); ok && e.Rank == vllm.ProbeRank {
		return &e, nil
	}
	return nil, nil
}

func firstBaseModel(models []Model) (id string, ok bool) {
	for _, m := range models {
		if m.Parent == "" {
			return m.ID, true
		}
	}
	return "", false
}
