// Package stored finds the replica that holds a stored response of /v1/responses.
package stored

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sync/errgroup"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/recovery"
	"warmroute/router/responseindex"
)

const (
	// maxSearched is how many backends one search asks at a time, maxSearches how many searches run at once: a client can name
	// any id.
	maxSearched = 4
	maxSearches = 16
	// searchTimeout bounds a search. A replica responds from memory.
	searchTimeout = 3 * time.Second
)

// Responses has what is known of the backends that hold stored responses, and bounds the searches for others.
type Responses struct {
	Index    *responseindex.Index
	searches chan struct{} // capacity maxSearches: those that run
}

// NewResponses returns a Responses that knows what index has.
func NewResponses(index *responseindex.Index) Responses {
	return Responses{index, make(chan struct{}, maxSearches)}
}

// Input is what a request says of stored responses.
type Input struct {
	RefersTo   string            // id of the response that it continues or is about; empty: none
	RefersToAt int               // index of that string in the body; 0: it is not there
	ReplicaID  string            // by which the replica knows that response
	Backend    *backends.Backend // that holds that one; nil: not known yet
	ChosenID   string            // that the client gives to the new response; empty: none
	ChosenIDAt int               // index of that string in the body; 0: there is none
	Scope      string            // of the ids that the key's clients choose; empty: none concern the request
	Unstored   bool              // the new response is not to be stored
}

// Refers reports whether the request continues a stored response or is about one.
func (s *Input) Refers() bool {
	return s.RefersTo != "" || s.Scope != "" && s.RefersToAt > 0 // with keys, an empty id refers to one as well
}

// ScopeOf returns the scope of the ids that clients with the key of that name choose. JSON and URLs leave its characters as they
// are, and it begins with resp_, which vLLM before its pull request 25428 requires of an id.
func ScopeOf(keyName string) string {
	hash := sha256.Sum256([]byte(keyName))
	return "resp_wr-" + hex.EncodeToString(hash[:16]) + "-"
}

// ScopeEdits returns the edits that insert the scope before each id in the body that has one at the replica.
func (s *Input) ScopeEdits() (edits []prompt.Edit) {
	if s.Scope == "" {
		return nil
	}
	if s.ChosenIDAt > 0 {
		edits = append(edits, prompt.Edit{Start: s.ChosenIDAt, End: s.ChosenIDAt, Text: s.Scope})
	}
	if s.RefersToAt > 0 && s.ReplicaID != s.RefersTo {
		edits = append(edits, prompt.Edit{Start: s.RefersToAt, End: s.RefersToAt, Text: s.Scope})
	}
	return edits
}

// Search asks backends for a stored response, maxSearched at a time, and returns one that has it, or nil. allResponded is
// false if some did not respond. proxyInstances names the proxies that the request has passed. It blocks while maxSearches
// others run, and then for searchTimeout at most.
func (r *Responses) Search(
	ctx context.Context, panics recovery.Reporter, id string, list []*backends.Backend, proxyInstances string,
) (holder *backends.Backend, allResponded bool) {
	select {
	case r.searches <- struct{}{}:
		defer func() { <-r.searches }()
	case <-ctx.Done():
		return nil, false
	}
	ctx, cancel := context.WithTimeout(ctx, searchTimeout)
	defer cancel()
	var unresponsive atomic.Int64
	var found atomic.Pointer[backends.Backend]
	var searches errgroup.Group
	searches.SetLimit(maxSearched)
	asked := map[*backends.Backend]bool{} // servers: the ranks of one have the same responses
	for _, b := range list {
		if asked[b.Server()] {
			continue
		}
		asked[b.Server()] = true
		searches.Go(func() error {
			var has bool
			err := errSearchPanicked
			panics.CallAndRecover(recovery.Handler, func() { has, err = hasResponse(ctx, b, id, proxyInstances) })
			switch {
			case err != nil:
				unresponsive.Add(1)
			case has:
				found.Store(b)
				cancel() // the other searches
			}
			return nil
		})
	}
	_ = searches.Wait()
	return found.Load(), unresponsive.Load() == 0
}

var (
	errUnavailable    = errors.New("replica is unavailable")
	errSearchPanicked = errors.New("search panicked")
)

// hasResponse asks a replica for a stored response. One that is down is not asked.
func hasResponse(ctx context.Context, b *backends.Backend, id, proxyInstances string) (bool, error) {
	if b.State() == backends.Down {
		return false, errUnavailable
	}
	resp, err := b.Get(ctx, "/v1/responses/"+id, "application/json", proxyInstances, 0)
	if err != nil {
		return false, err
	}
	defer fasthttp.ReleaseResponse(resp)
	switch resp.StatusCode() {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return false, errUnavailable
	}
	return resp.StatusCode() == http.StatusOK, nil
}
