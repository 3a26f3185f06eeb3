package proxy

import (
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/upstream"
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
	prompt, output, cached int // tokens
}

// findAccount returns the holder of the key that a request came with, and counts requests without a valid one. It is nil
// without an error when no keys are configured.
func (p *Proxy) findAccount(r *http.Request, d api.Dialect) (*apikey.Account, *fault.Error) {
	if p.keys.Empty() {
		return nil, nil
	}
	problem, message := metrics.KeyMissing, "missing API key: send it as Authorization: Bearer KEY"
	for _, secret := range admit.PresentedSecrets(r.Header, d) {
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
	r.tenant = r.tenantAt(r.clientAddress)
	return apiErr
}

// acquireLease counts the request against the limits of its key, and writes their state to h.
func (c *caller) acquireLease(h http.Header) *fault.Error {
	if c.account == nil {
		return nil
	}
	lease, refusal := c.account.TryAcquire()
	c.lease = lease
	c.writeRateHeaders(h)
	if refusal != nil {
		return rateLimitError(refusal)
	}
	return nil
}

// chargePrompt charges the prompt's tokens to the key's rate limit; where no engine works on it, its bytes to a limit of their own.
func (c *caller) chargePrompt(e *api.Endpoint, in *input, h http.Header) *fault.Error {
	var refusal *apikey.LimitError
	if e.NoEngine {
		refusal = c.lease.ChargeTokenize(len(in.body))
	} else {
		refusal = c.lease.ChargePrompt(in.request.Bytes / bytesPerToken)
	}
	if refusal == nil {
		return nil
	}
	c.writeRateHeaders(h)
	return rateLimitError(refusal)
}

// setTokenUsage sets the tokens of an attempt that an engine has worked on: the replica's own count, else an estimate, which
// includes what was generated and not sent after a disconnect or cancel, and the prefill time that cached tokens saved.
// Failed attempts count nothing.
func (a *attempt) setTokenUsage() {
	if a.result.End == router.NotProcessed {
		return
	}
	a.req.promptTokens, a.req.completionTokens = min(max(a.result.PromptTokens, 0), apikey.MaxTokens),
		min(max(a.result.OutputTokens, 0), apikey.MaxTokens)
	a.req.estimated = estimatedUsage{}
	if a.req.promptTokens == 0 {
		a.req.promptTokens = a.decision.PromptTokens
		a.req.estimated.prompt = a.req.promptTokens
	}
	if a.req.completionTokens == 0 {
		a.req.completionTokens = a.estimatedTokens
	}
	if a.result.End == router.ClientDisconnected && (a.req.completionTokens == 0 || !a.itl.Last.IsZero()) {
		a.req.completionTokens = a.decision.EstimateOutputTokens(a.req.completionTokens, a.itl.Last)
	}
	if a.req.estimated.output = a.req.completionTokens; !a.countsEvents {
		a.req.estimated.output = max(a.req.completionTokens-max(a.result.OutputTokens, 0), 0)
	}
	a.req.outcome.PredictedTokens = a.req.matchedTokens * a.req.promptTokens / max(a.req.estimatedInput, 1)
	a.req.outcome.CachedTokens = min(max(a.result.CachedTokens, 0), a.req.promptTokens)
	prefilled := a.decision
	if a.kvTransfer != nil {
		prefilled = a.kvTransfer.Prefill
	}
	if !a.result.CachedKnown {
		a.req.outcome.CachedTokens = min(a.req.outcome.PredictedTokens, a.req.promptTokens)
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
		EstimatedTokens: int64(r.estimated.prompt + r.estimated.output), EstimatedCachedTokens: int64(r.estimated.cached),
		QueueSeconds: r.history.waited.Total().Seconds(), SavedPrefillSeconds: o.SavedPrefillSeconds,
	}
	if o.Failed() {
		c.Errors = 1
	}
	r.proxy.usage.Record(r.keyName(), o.Model, o.ModelName, ended, &c)
}

// rateLimitError returns OpenAI's error for a request beyond a limit.
func rateLimitError(r *apikey.LimitError) *fault.Error {
	e := fault.New(http.StatusTooManyRequests, fault.CodeRateLimitExceeded, "")
	e.Kind, e.RetryAfter = string(r.Limit), max(int(math.Ceil(r.RetryAfter.Seconds())), 1)
	switch r.Limit {
	case apikey.LimitConcurrency:
		e.Message = fmt.Sprintf("Rate limit reached: this API key may have %d concurrent requests. Try again when one has ended.", r.Max)
	case apikey.LimitTokenizeBytes:
		e.Message = fmt.Sprintf("Rate limit reached: this API key may have %d bytes per minute tokenized or counted. Try again in %ds.", r.Max,
			e.RetryAfter)
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
func (c *caller) mayShowRoute(p *Proxy, s *Settings) bool {
	if c.account == nil && !p.keys.Empty() { // it is not authenticated
		return false
	}
	return s.RouteHeaders && (c.account == nil || c.account.RouteHeaders)
}

// fairnessID returns whose share of the fleet a request with that header uses: its tenant's, divided among the users that the first
// of the userHeaders names. Without keys, what clients send as a key divides the share of their address likewise. Any number of
// made-up ones is worth no more.
func fairnessID(t admit.Tenant, userHeaders []string, h http.Header) uint64 {
	var tenant, part uint64
	switch {
	case t.Key != "":
		tenant = xxh3.HashString(t.Key)
	case t.Network.IsValid():
		tenant, part = networkHash(t.Network), admit.KeyFingerprint(h)
	default:
		return 0
	}
	if _, user := firstHeader(userHeaders, h); user != "" {
		part = xxh3.HashString(user)
	}
	return router.TenantID(admit.NonzeroHash(tenant), part)
}

// networkHash returns the hash of a client's network; 0: it is not known.
func networkHash(network netip.Prefix) uint64 {
	if !network.IsValid() {
		return 0
	}
	address := network.Addr().As16()
	return admit.NonzeroHash(xxh3.Hash(address[:]))
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
	return engineModel + "\x00" + strconv.FormatUint(admit.KeyFingerprint(h), 16)
}

// queueTimeoutsOr returns how long the request may wait for a backend: as its key says, else as configured.
func (c *caller) queueTimeoutsOr(configured router.QueueTimeouts) router.QueueTimeouts {
	if configured != (router.QueueTimeouts{}) && c.account != nil && c.account.QueueTime > 0 {
		return router.QueueTimeouts{Total: c.account.QueueTime}
	}
	return configured
}

// maxPriority is the lowest priority. A client cannot ask for a higher one than its key has.
const maxPriority = 100

// applyRoutingHints takes the client's address, and the tenant, the conversation, the priority and the target for the time to first
// token from its headers.
func (r *request) applyRoutingHints() *fault.Error {
	h, req := r.httpReq.Header, &r.input.request
	req.Tenant = fairnessID(r.tenant, r.settings.UserHeaders, h)
	req.Client = networkHash(admit.ClientNetwork(r.clientAddress))
	if r.account != nil {
		req.Priority = r.account.Priority
	}
	r.input.setConversation(r.settings.ConversationHeaders, h)
	r.traceConversation(h)
	if given := h[upstream.PriorityHeader]; len(given) > 0 {
		n, err := strconv.Atoi(given[0])
		if err != nil || n < 0 || n > maxPriority || len(given) > 1 {
			return fault.InvalidRequest(upstream.PriorityHeader, fmt.Sprintf("%s must be one integer from 0 to %d; lower values go first",
				upstream.PriorityHeader, maxPriority))
		}
		req.Priority = max(req.Priority, n)
	}
	target, ok := parseTTFTTarget(h[upstream.TTFTHeader], r.ttftTarget(r.settings.TTFTTarget))
	if !ok {
		return fault.InvalidRequest(upstream.TTFTHeader, fmt.Sprintf("%s must be one number of milliseconds from 1 to %d, or 0 for no target",
			upstream.TTFTHeader, maxTTFTTarget.Milliseconds()))
	}
	if target > 0 && req.Priority <= 0 { // low-priority requests wait for what others leave
		req.FirstTokenDue, req.RefuseLate = r.inFlight.Arrived.Add(target), r.settings.RefuseLate
	}
	return nil
}

// ttftTarget returns the target of the key for the time to first token, or else the configured one; 0: none.
func (c *caller) ttftTarget(configured time.Duration) time.Duration {
	if c.account != nil && c.account.SLOTTFT > 0 {
		return c.account.SLOTTFT
	}
	return configured
}

// maxTTFTTarget is the longest target for the time to first token that a client may ask for.
const maxTTFTTarget = 24 * time.Hour

// parseTTFTTarget parses the values of upstream.TTFTHeader. Without a value, it returns configured. ok is false if there are several
// values, or if the value is not 0 or a number from 1 to maxTTFTTarget in milliseconds.
func parseTTFTTarget(values []string, configured time.Duration) (target time.Duration, ok bool) {
	if len(values) == 0 {
		return configured, true
	}
	ms, err := strconv.ParseFloat(values[0], 64)
	if err != nil || len(values) > 1 || ms != 0 && !(ms >= 1 && ms <= float64(maxTTFTTarget.Milliseconds())) {
		return 0, false
	}
	return time.Duration(ms * float64(time.Millisecond)), true
}

// setConversation sets the conversation from the first of the headers of these names that h has.
func (in *input) setConversation(names []string, h http.Header) {
	if name, id := firstHeader(names, h); id != "" {
		in.request.Conversation = admit.NonzeroHash(xxh3.HashString(id[:min(len(id), prompt.MaxConversationBytes)]))
		in.conversationSource = name
	}
}

// firstHeader returns the first of the names of which the header has a value, and the value; "" if it has none.
func firstHeader(names []string, h http.Header) (name, value string) {
	for _, name := range names {
		if value := httpheader.First(h, name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// traceConversation adds the conversation to the trace, if a header names it. It leaves out a name with the client's key or cookies,
// since routing.conversation_headers may list their headers.
func (r *request) traceConversation(h http.Header) {
	switch name := r.input.conversationSource; name {
	case "", "Authorization", "X-Api-Key", "Cookie":
	default:
		if id := httpheader.First(h, name); r.spans.IsRecording() && !admit.IDContainsSecret(h, id) {
			r.spans.SetConversation(id)
		}
	}
}

// removeClientKey deletes the headers that hold the client's key, and returns the query without it: a replica must not see a key
// that opens this proxy. Without configured keys any header may hold the same few letters by chance.
func (r *request) removeClientKey() (query string) {
	query = admit.RedactQuery(r.httpReq.URL.RawQuery, "")
	if r.account == nil {
		return query
	}
	for _, secret := range admit.PresentedSecrets(r.httpReq.Header, r.endpoint.Dialect()) {
		if len(secret) < apikey.MinKeyLength {
			continue
		}
		for name, values := range r.httpReq.Header {
			if slices.ContainsFunc(values, func(v string) bool { return strings.Contains(v, secret) }) {
				delete(r.httpReq.Header, name)
			}
		}
		query = admit.RedactQuery(query, secret)
	}
	return query
}

// maxAdapterNameBytes bounds the names that an AdapterPattern matches.
const maxAdapterNameBytes = 256

// AdapterPattern matches the names of LoRA adapters that replicas load at the first request for one.
type AdapterPattern struct {
	Prefix, Suffix string // of the name, with anything in between
	Base           string // the model whose replicas load it
}

func (p *AdapterPattern) matches(name string) bool {
	return len(name) <= maxAdapterNameBytes && len(name) >= len(p.Prefix)+len(p.Suffix) &&
		strings.HasPrefix(name, p.Prefix) && strings.HasSuffix(name, p.Suffix)
}

// findServingModel returns the model whose replicas serve requests for a model: the base model of the first pattern
// that matches, unless the model is listed and no adapter.
func (s *Settings) findServingModel(c *backends.Catalog, model string) string {
	if e, listed := c.Find(model); listed && !e.Adapter {
		return model
	}
	for i := range s.AdapterPatterns {
		if p := &s.AdapterPatterns[i]; p.matches(model) {
			return p.Base
		}
	}
	return model
}

// mayAwaitModel reports whether a request waits although no replica lists the model that serves it: none has listed
// any, or the model can be started.
func (s *Settings) mayAwaitModel(c *backends.Catalog, model string) bool {
	return len(c.Models) == 0 || s.StartTimeouts[model] > 0
}

// queueTimeoutsOf returns how long a request for the model may wait for a backend, and the name of the setting that limits this
// while none is ready.
func (s *Settings) queueTimeoutsOf(model string, c *caller) (t router.QueueTimeouts, noneReadySetting string) {
	t, noneReadySetting = s.QueueTimeouts, "routing.queue.none_ready_timeout"
	if start := s.StartTimeouts[model]; start > 0 && t != (router.QueueTimeouts{}) {
		t.NoneReady, noneReadySetting = start, "start_hooks[].timeout"
	}
	return c.queueTimeoutsOr(t), noneReadySetting
}

// setModelBackends has the request routed to the backends that serve the model; empty: to any. It
// returns the engine's name of it, which seeds the hashes of its prompts.
func (r *request) setModelBackends(model string) (engineModel string, apiErr *fault.Error) {
	catalog, req, s := r.proxy.registry.Catalog(), &r.input.request, r.settings
	req.Endpoint = r.endpoint.Number
	req.NonGenerative = r.endpoint.Format == api.PlainFormat
	if model == "" {
		req.Backends = r.proxy.registry.All()
		return "", nil
	}
	if asked := r.named.nameOr(model); r.account != nil && !r.account.MayUse(asked) {
		return "", r.proxy.unknownModelError(asked, r.account)
	}
	serving := s.findServingModel(catalog, model)
	own, listed := catalog.Find(model)
	if own.Adapter || serving != model {
		req.Adapter = model
	}
	entry, ok := catalog.Find(serving)
	switch {
	case !ok && (r.named.choice.IsAwaited || s.mayAwaitModel(catalog, serving)):
		req.Backends, req.CatalogID, req.Model, req.AwaitsModel = nil, serving, serving,
			r.named.choice.IsAwaited || s.StartTimeouts[serving] > 0
		return model, nil
	case !ok:
		return "", r.proxy.unknownModelError(r.named.nameOr(model), r.account)
	}
	r.outcome.Model = entry.ID
	if listed {
		r.outcome.Model = own.ID
	}
	req.Backends, req.CatalogID, req.AwaitsModel = entry.Backends, entry.ID, s.StartTimeouts[entry.ID] > 0
	req.Model = catalog.EngineModel(entry.ID)
	req.ContextLengths = catalog.ContextLengths(entry.ID)
	if serving != model {
		return model, nil
	}
	return req.Model, nil
}

// canGoToAnyBackend reports whether a request to e that names no model, sent by the holder of a key, may go to any backend: e is an
// extra path, whose requests need no model, and there is no default model.
func canGoToAnyBackend(c *backends.Catalog, e *api.Endpoint, holder *apikey.Account) bool {
	_, hasDefault := c.OnlyBaseModel()
	return e.IsExtra && !hasDefault && len(c.Models) > 0 && (holder == nil || holder.Models == nil)
}

// parseFormAndSelectModel finds the model of a multipart upload, and sets the backends that serve it. What is not a form
// at all is left to the replica to refuse.
func (r *request) parseFormAndSelectModel(pr *prompt.Prompt) *fault.Error {
	if len(r.input.body) == 0 {
		return fault.InvalidRequest("", "the request body is empty: a multipart form was expected")
	}
	fields, err := admit.ParseForm(r.httpReq.Header["Content-Type"], r.input.body)
	limited := r.account != nil && r.account.Models != nil
	switch {
	case err != nil && err != admit.ErrNotMultipart:
		return fault.InvalidRequest(admit.AmbiguousFields[err], err.Error())
	case err != nil && limited: // the replica could find a model in it that this key may not use
		return fault.InvalidRequest("", "the request body must be a multipart form, since this API key is limited to some models")
	}
	if apiErr := r.settings.checkFormTransferParams(pr, fields.Xargs); apiErr != nil {
		return apiErr
	}
	model, apiErr := r.resolveModel(pr, fields.Model)
	if apiErr != nil {
		return apiErr
	}
	_, apiErr = r.setModelBackends(model)
	r.input.request.Bytes = admit.UploadPromptBytes
	r.input.request.Sequences = 1
	r.input.request.BodyBytes = cap(r.input.body)
	return apiErr
}

// checkFormTransferParams is checkTransferParams for a form's vllm_xargs. JSON that is not understood here is
// refused, since vLLM might understand it. It is parsed into pr.
func (s *Settings) checkFormTransferParams(pr *prompt.Prompt, xargs []byte) *fault.Error {
	if len(xargs) == 0 || s.allowsTransferParams() {
		return nil
	}
	if err := pr.Parse(prompt.Other, xargs); err != nil {
		return fault.InvalidRequest("vllm_xargs", "vllm_xargs must be a JSON object: "+err.Error())
	}
	return s.checkTransferParams(pr)
}

// defaultModel returns the model of a request that names none: the only base model that its key may use.
func (p *Proxy) defaultModel(c *backends.Catalog, holder *apikey.Account) (id string, apiErr *fault.Error) {
	only, ok := c.OnlyBaseModel()
	if holder != nil && holder.Models != nil {
		only, ok = backends.OnlyBaseModel(p.visibleModels(c, holder))
	}
	switch {
	case ok:
		return only, nil
	case len(p.visibleModels(c, holder)) == 0:
		return "", p.unknownModelError("", holder)
	}
	return "", fault.InvalidRequest("model", "model is missing: set it to one of those that GET /v1/models lists")
}
