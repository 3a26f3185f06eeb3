package proxy

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/router"
	"warmroute/usage"
)

// bytesPerToken estimates the tokens of a prompt before a replica has counted them.
const bytesPerToken = 4

// caller is who sends a request, and what the request has cost.
type caller struct {
	account          *apikey.Account // nil: no keys are configured
	lease            apikey.Lease    // of the holder; zero: none
	promptTokens     int             // as the key is charged; 0: no engine worked on the prompt
	completionTokens int             // that the engine has generated, about if it has not counted them
	estimated        estimatedUsage  // of these
}

// keyName returns the name of the key's holder; empty: there is none.
func (c *caller) keyName() string {
	if c.account == nil {
		return ""
	}
	return c.account.Name
}

// estimatedUsage is how much of what a request has used is an estimate.
type estimatedUsage struct {
	tokens int // of the prompt and the output
	cached int // of the cached tokens
}

// findAccount returns the holder of the key that a request came with, and counts requests without a valid one. It is nil
// without an error when no keys are configured.
func (p *Proxy) findAccount(r *http.Request, d api.Dialect) (*apikey.Account, *fault.Error) {
	if p.keys.Empty() {
		return nil, nil
	}
	problem, message := metrics.KeyMissing, "missing API key: send it as Authorization: Bearer KEY"
	for _, secret := range presentedSecrets(r.Header, d) {
		if secret == "" {
			continue
		}
		switch a, known := p.keys.Find(secret); {
		case known && !a.Expired():
			return a, nil
		case known:
			problem, message = metrics.KeyExpired, "API key has expired"
		case problem == metrics.KeyMissing:
			problem, message = metrics.KeyUnknown, "invalid API key"
		}
	}
	p.metrics.CountUnauthorized(problem)
	return nil, fault.New(http.StatusUnauthorized, fault.CodeInvalidAPIKey, message)
}

// presentedSecrets returns the secrets that a request came with, "" for none. The first that is a valid key counts.
// Anthropic's clients send a key in X-Api-Key, some of them beside a token of their own.
func presentedSecrets(h http.Header, d api.Dialect) (secrets [2]string) {
	secrets[0] = apikey.Bearer(h)
	if d == api.Anthropic {
		secrets[1] = apikey.XAPIKey(h)
	}
	return secrets
}

// requireKey wraps a handler that needs an API key, where keys are configured.
func (p *Proxy) requireKey(handler func(http.ResponseWriter, *http.Request, *apikey.Account)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		holder, apiErr := p.findAccount(r, api.Anthropic)
		if apiErr != nil {
			fault.Write(w, api.OpenAI, apiErr)
			return
		}
		handler(w, r, holder)
	}
}

// authenticate finds who sends the request.
func (r *request) authenticate() (apiErr *fault.Error) {
	r.account, apiErr = r.proxy.findAccount(r.httpReq, r.endpoint.Dialect())
	r.tenant = r.tenantOf()
	return apiErr
}

// acquireKeyLease counts the request against the limits of its key, and writes their state to the client's header.
func (r *request) acquireKeyLease() *fault.Error {
	if r.account == nil {
		return nil
	}
	lease, refusal := r.account.TryAcquire()
	r.lease = lease
	r.writeRateHeaders(r.client.Header())
	if refusal != nil {
		return rateLimitError(refusal)
	}
	return nil
}

// chargePrompt charges the prompt's tokens to the key's rate limit; where no engine works on it, its bytes to a limit of their own.
func (r *request) chargePrompt() *fault.Error {
	var refusal *apikey.LimitError
	if r.endpoint.NoEngine {
		refusal = r.lease.ChargeTokenize(len(r.input.body))
	} else {
		refusal = r.lease.ChargePrompt(r.input.request.Bytes / bytesPerToken)
	}
	if refusal == nil {
		return nil
	}
	r.writeRateHeaders(r.client.Header())
	return rateLimitError(refusal)
}

// setTokenUsage sets the tokens of an attempt that an engine has worked on: the replica's own count, else an estimate, which
// includes what was generated and not sent after a disconnect or cancel, and the prefill time that cached tokens saved.
// Failed attempts count nothing.
func (a *attempt) setTokenUsage() {
	if a.result.End == router.NotProcessed {
		return
	}
	a.req.promptTokens, a.req.completionTokens = min(max(a.result.PromptTokens, 0), apikey.MaxTokens), min(max(a.result.OutputTokens, 0), apikey.MaxTokens)
	a.req.estimated = estimatedUsage{}
	if a.req.promptTokens == 0 {
		a.req.promptTokens = a.decision.PromptTokens
		a.req.estimated.tokens = a.req.promptTokens
	}
	if a.req.completionTokens == 0 {
		a.req.completionTokens = a.estimatedTokens
	}
	if a.result.End == router.ClientDisconnected && (a.req.completionTokens == 0 || !a.itl.Last.IsZero()) {
		a.req.completionTokens = a.decision.EstimateOutputTokens(a.req.completionTokens, a.itl.Last)
	}
	a.req.estimated.tokens += max(a.req.completionTokens-max(a.result.OutputTokens, 0), 0)
	a.req.outcome.PredictedTokens = a.req.matchedTokens * a.req.promptTokens / max(a.req.estimatedInput, 1)
	a.req.outcome.CachedTokens = min(max(a.result.CachedTokens, 0), a.req.promptTokens)
	prefilled := a.decision
	if a.handover != nil {
		prefilled = a.handover.Prefill
	}
	if !a.result.CachedKnown {
		a.req.outcome.CachedTokens = min(prefilled.MatchedTokens, a.req.promptTokens)
		a.req.estimated.cached = a.req.outcome.CachedTokens
	}
	a.req.outcome.SavedPrefillSeconds = prefilled.SavedPrefillSeconds(a.req.promptTokens, a.req.outcome.CachedTokens)
}

// recordKeyUsage adds what the request has used to the account of its key. Requests without a valid one use nothing.
func (r *request) recordKeyUsage(ended time.Time) {
	if r.account == nil && !r.proxy.keys.Empty() {
		return
	}
	o := &r.outcome
	c := usage.Counts{
		Requests: 1, PromptTokens: int64(r.promptTokens), CachedTokens: int64(o.CachedTokens), OutputTokens: int64(r.completionTokens),
		EstimatedTokens: int64(r.estimated.tokens), EstimatedCachedTokens: int64(r.estimated.cached),
		QueueSeconds: r.history.waited.Total().Seconds(), SavedPrefillSeconds: o.SavedPrefillSeconds,
	}
	if o.Failed() {
		c.Errors = 1
	}
	r.proxy.usage.Record(r.keyName(), o.Model, ended, &c)
}

// rateLimitError returns OpenAI's error for a request beyond a limit.
func rateLimitError(r *apikey.LimitError) *fault.Error {
	e := fault.New(http.StatusTooManyRequests, fault.CodeRateLimitExceeded, "")
	e.Kind, e.RetryAfter = string(r.Limit), max(int(math.Ceil(r.RetryAfter.Seconds())), 1)
	switch r.Limit {
	case apikey.LimitConcurrency:
		e.Message = fmt.Sprintf("Rate limit reached: this API key may have %d concurrent requests. Try again when one has ended.", r.Max)
	case apikey.LimitTokenizeBytes:
		e.Message = fmt.Sprintf("Rate limit reached: this API key may have %d bytes per minute tokenized or counted. Try again in %ds.", r.Max, e.RetryAfter)
	default:
		e.Message = fmt.Sprintf("Rate limit reached: this API key may use %d %s per minute. Try again in %ds.", r.Max, r.Limit, e.RetryAfter)
	}
	return e
}

// writeRateHeaders writes the state of the key's rate limits, in OpenAI's headers.
func (c *caller) writeRateHeaders(h http.Header) {
	requests, tokens := c.account.Rates()
	for kind, rate := range map[string]apikey.Rate{"Requests": requests, "Tokens": tokens} {
		if rate.Limit > 0 {
			h["X-Ratelimit-Limit-"+kind] = []string{strconv.Itoa(rate.Limit)}
			h["X-Ratelimit-Remaining-"+kind] = []string{strconv.Itoa(rate.Remaining)}
			h["X-Ratelimit-Reset-"+kind] = []string{rate.Reset.Round(time.Millisecond).String()}
		}
	}
}

// mayShowRoute reports whether the client may know where its request went: a match tells what others have sent.
func (r *request) mayShowRoute() bool {
	if r.account == nil && !r.proxy.keys.Empty() { // it is not authenticated
		return false
	}
	return r.settings.RouteHeaders && (r.account == nil || r.account.RouteHeaders)
}

// fairnessID returns whose share of the fleet the request uses: its tenant's. Without keys, what clients send as a key
// divides the share of their address: any number of made-up ones is worth no more.
func (r *request) fairnessID() uint64 {
	switch {
	case r.tenant.Key != "":
		return router.TenantID(nonzero(xxh3.HashString(r.tenant.Key)), 0)
	case r.tenant.Network.IsValid():
		address := r.tenant.Network.Addr().As16()
		return router.TenantID(nonzero(xxh3.Hash(address[:])), keyFingerprint(r.httpReq.Header))
	}
	return 0
}

// blockSeed returns what the hashes of the request's blocks begin from: the engine's name of the model and, where tenants
// are isolated, the tenant. A holder is told by the hash of a key, which others cannot know: blocks whose beginning is known
// could be made to collide.
func (c *caller) blockSeed(engineModel string, isolated bool, h http.Header) string {
	switch {
	case !isolated:
		return engineModel
	case c.account != nil:
		return engineModel + "\x00" + string(c.account.Hashes[0][:])
	}
	return engineModel + "\x00" + strconv.FormatUint(keyFingerprint(h), 16)
}

// queueTimeoutsOr returns how long the request may wait for a backend: as its key says, else as configured.
func (c *caller) queueTimeoutsOr(configured router.QueueTimeouts) router.QueueTimeouts {
	if configured != (router.QueueTimeouts{}) && c.account != nil && c.account.QueueTime > 0 {
		return router.QueueTimeouts{Total: c.account.QueueTime}
	}
	return configured
}
