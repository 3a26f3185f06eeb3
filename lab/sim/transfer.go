package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"warmroute/lab/sim/engine"
)

// ConnectorConfig is whether and how a replica transfers KV, like vLLM with its NixlConnector. Its times and sizes are
// those of engine.Config.
type ConnectorConfig struct {
	Enabled bool
	// Recompute is kv_load_failure_policy recompute: a request whose transfer has failed computes its prompt. Else it
	// ends with an error.
	Recompute bool
}

// handshakeTimeout is how long a transfer from a replica that is down and was not known before takes to fail, with
// speed 1.
const handshakeTimeout = 5 * time.Second

// connector is the state of a server's transfers.
type connector struct {
	client http.Client // of other replicas' side channels

	mu    sync.Mutex
	known map[string]string // engine ids by address, of replicas with which a handshake succeeded
}

func newConnector() *connector {
	return &connector{
		client: http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: handshakeTimeout},
		known:  make(map[string]string),
	}
}

// sideChannelPath is where a replica serves what NIXL does in vLLM.
const sideChannelPath = "/sim/kv-transfer"

// sideChannelRequest is the request for KV that a replica sends, for a decode request, to the replica that did the prefill.
type sideChannelRequest struct {
	Operation string `json:"operation"` // one of the constants below
	EngineID  string `json:"engine_id"`
	RequestID string `json:"request_id"`
}

const (
	operationHandshake = "handshake" // tells the engine's compatibility
	operationHeartbeat = "heartbeat" // renews the lease of the request's blocks
	operationRead      = "read"      // reads the request's blocks, then releases them
	operationRelease   = "release"   // releases them unread
)

// sideChannelResponse is the response to it.
type sideChannelResponse struct {
	Compatibility string `json:"compatibility"` // of both engines must be equal
	Prompt        uint64 `json:"prompt"`        // hash of the prompt whose KV was read; 0: of none
}

// compatibility names what two engines that transfer KV must have in common.
func (s *Server) compatibility() string {
	return s.cfg.Version + " " + s.cfg.Model + " " + strconv.Itoa(s.cfg.Engine.BlockSize)
}

// serveSideChannel handles POST /sim/kv-transfer.
func (s *Server) serveSideChannel(w http.ResponseWriter, r *http.Request) {
	var in sideChannelRequest
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<16)).Decode(&in); err != nil {
		writeError(w, badRequest("", err.Error()))
		return
	}
	out, err := s.executeSideChannel(in)
	if err != nil {
		writeError(w, badRequest("", err.Error()))
		return
	}
	body, _ := json.Marshal(out) // strings and numbers always marshal
	writeJSON(w, http.StatusOK, body)
}

func (s *Server) executeSideChannel(in sideChannelRequest) (out sideChannelResponse, err error) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if in.EngineID != s.engineID {
		return out, fmt.Errorf("engine %q is not this one", in.EngineID)
	}
	now := time.Since(s.startedAt)
	s.expireLeases(now)
	q := s.prefillRequests[in.RequestID] // nil: not known any more
	switch in.Operation {
	case operationHandshake:
		out.Compatibility = s.compatibility()
	case operationHeartbeat:
		if q != nil {
			q.rank.engine.RenewLease(&q.Request, now+s.cfg.Engine.Lease*2/3)
		}
	case operationRead, operationRelease:
		if q == nil || !q.rank.engine.ReleasePinned(&q.Request) {
			s.ranks[0].counters.lateNotifications++
			return out, nil // what is read are blocks of other requests
		}
		if !q.Corrupt {
			out.Prompt = q.promptHash
		}
	default:
		return out, fmt.Errorf("operation %q is unknown", in.Operation)
	}
	return out, nil
}

// expireLeases releases the blocks whose leases have ended. It requires engineMu.
func (s *Server) expireLeases(now time.Duration) {
	for _, k := range s.ranks {
		k.engine.ExpireLeases(now)
	}
}

// addPrefillRequests makes those of sequences that are prefill requests known to the side channel, and forgets the others that
// have ended. It requires engineMu.
func (s *Server) addPrefillRequests(sequences []*sequence) {
	if !sequences[0].PrefillRequest {
		return
	}
	for id, q := range s.prefillRequests {
		if q.Ended() {
			delete(s.prefillRequests, id)
		}
	}
	for _, q := range sequences {
		s.prefillRequests[q.transferID] = q
	}
}

// call sends a request to the side channel of the replica that a decode request names.
func (c *connector) call(ctx context.Context, p *transferParams, operation string) (out sideChannelResponse, err error) {
	body, err := json.Marshal(sideChannelRequest{operation, p.engineID, p.requestID})
	if err != nil {
		return out, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.address+sideChannelPath, bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return out, fmt.Errorf("%w: %w", errNotReached, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return out, fmt.Errorf("status %d", resp.StatusCode)
	}
	return out, json.NewDecoder(io.LimitReader(resp.Body, 1<<16)).Decode(&out)
}

var errNotReached = errors.New("replica cannot be reached")

// connect makes sure that KV can be transferred from the replica that p names. It blocks for timeout if that replica is
// not known and cannot be reached.
func (c *connector) connect(ctx context.Context, p *transferParams, compatibility string, timeout time.Duration) error {
	if p.address == "" {
		return errors.New("a field of kv_transfer_params is missing")
	}
	if c.isKnown(p) {
		return nil
	}
	begun := time.Now()
	out, err := c.call(ctx, p, operationHandshake)
	switch {
	case errors.Is(err, errNotReached):
		select {
		case <-time.After(time.Until(begun.Add(timeout))):
		case <-ctx.Done():
		}
		return err
	case err != nil:
		return err
	case out.Compatibility != compatibility:
		return fmt.Errorf("engine is %s, not %s", out.Compatibility, compatibility)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[p.address] = p.engineID
	return nil
}

// isKnown reports whether a handshake with the engine that p names has succeeded.
func (c *connector) isKnown(p *transferParams) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[p.address] == p.engineID
}

// startTransfers starts to transfer the prompts of the sequences that are decode requests, and to send heartbeats
// meanwhile. The caller calls stop when the request has ended; it aborts what has not ended and blocks until all has.
func (s *Server) startTransfers(r *http.Request, sequences []*sequence) (stop func()) {
	ctx, cancel := context.WithCancel(r.Context())
	var transfers sync.WaitGroup
	for _, q := range sequences {
		if q.RemoteTokens > 0 {
			transfers.Go(func() {
				switch err := s.transfer(ctx, q); {
				case err == nil:
				case ctx.Err() == nil:
					s.failTransfer(q)
				case !q.isEngineDead():
					s.releaseRemote(r, &q.transferParams)
				}
			})
		}
	}
	return func() {
		cancel()
		transfers.Wait()
	}
}

// transfer transfers the prompt of q once the engine has allocated its blocks.
func (s *Server) transfer(ctx context.Context, q *sequence) error {
	connectErr := s.connector.connect(ctx, &q.transferParams, s.compatibility(), time.Duration(float64(handshakeTimeout)/s.cfg.Engine.Speed))
	heartbeats := time.NewTicker(s.cfg.Engine.Lease / 6)
	defer heartbeats.Stop()
	var end <-chan time.Time // of the transfer, once it has begun
	for {
		if connectErr == nil {
			// The read shows whether it failed.
			_, _ = s.connector.call(ctx, &q.transferParams, operationHeartbeat)
		}
		select {
		case <-heartbeats.C:
		case at := <-q.transferBegun:
			if connectErr != nil {
				return connectErr
			}
			if _, ok := s.faults.matchAndCount(true, TransferFail); ok {
				return errors.New("simulated failure")
			}
			end = time.After(time.Until(s.processStartTime().Add(at)))
		case <-end:
			out, err := s.connector.call(ctx, &q.transferParams, operationRead)
			if err != nil {
				return err
			}
			s.endTransfer(q, out.Prompt)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endTransfer ends the transfer of q, which has read the KV of the prompt with that hash.
func (s *Server) endTransfer(q *sequence, promptHash uint64) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if !slices.Contains(q.rank.live, q) {
		return
	}
	outcome := engine.TransferDone
	if promptHash != q.promptHash {
		outcome = engine.TransferCorrupt
	}
	e := s.cfg.Engine
	bytes := float64(q.Transferred * e.TransferTokenBytes)
	q.rank.counters.transferBytes.observe(bytes, 1)
	q.rank.counters.transferTime.observe(bytes/e.TransferBandwidth/e.Speed, 1)
	q.rank.engine.EndTransfer(&q.Request, outcome)
}

// failTransfer lets q compute its prompt, or end, after its transfer has failed.
func (s *Server) failTransfer(q *sequence) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	i := slices.Index(q.rank.live, q)
	if i < 0 {
		return
	}
	q.rank.counters.failedTransfers++
	if s.cfg.Connector.Recompute {
		q.rank.engine.EndTransfer(&q.Request, engine.TransferFailed)
		return
	}
	q.rank.engine.Abort(&q.Request)
	q.rank.live = slices.Delete(q.rank.live, i, i+1)
	q.rank.counters.success[engineFailed]++
	q.publishEnd(transferFailed)
}

// releaseRemote releases the blocks that p names on another replica, as vLLM does for a decode request that it refuses or
// that is aborted before its transfer. It gives up when the process ends.
func (s *Server) releaseRemote(r *http.Request, p *transferParams) {
	if !s.cfg.Connector.Enabled || !p.decodeRequest || p.address == "" {
		return
	}
	process := r.Context().Value(processContextKey{}).(context.Context)
	_, _ = s.connector.call(process, p, operationRelease) // else the lease ends
}

// processContextKey is the key of the context of Run in that of a request.
type processContextKey struct{}

// lacksRemoteBlocks reports whether q is a decode request whose kv_transfer_params name too few blocks for its prompt. Such
// a request kills vLLM 0.32.
func (q *sequence) lacksRemoteBlocks(blockSize int) bool {
	return q.RemoteTokens > q.transferParams.blocks*blockSize
}

// refuse responds with err to a request with the body in, which was not passed to the engine.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, in fields, err error) {
	s.releaseRefused(r, in)
	writeError(w, err)
}

// releaseRefused releases the blocks of a decode request with the body in, which is refused.
func (s *Server) releaseRefused(r *http.Request, in fields) {
	if p, err := parseTransferParams(in["kv_transfer_params"]); err == nil {
		s.releaseRemote(r, &p)
	}
}

// garble replaces the output by a wrong one of the same length: that of a model which reads the KV of another prompt.
func (q *sequence) garble() {
	wrong := bytes.Clone(q.text)
	for i, c := range wrong {
		switch {
		case c >= 'a' && c <= 'z':
			wrong[i] = 'a' + (c-'a'+13)%26
		case c >= 'A' && c <= 'Z':
			wrong[i] = 'A' + (c-'A'+13)%26
		}
	}
	q.output = output{text: wrong}
}
