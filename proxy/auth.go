package proxy

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/metrics"
	"warmroute/proxy/apikey"
	"warmroute/router"
)

// bytesPerToken is what a prompt is charged by before a replica has counted it.
const bytesPerToken = 4

// findKey finds who holds the key that a request came with: nil without a fault
// when no keys are configured, and everybody may come in.
func (p *Proxy) findKey(r *http.Request, anthropic bool) (*apikey.Holder, *apiError) {
	if p.keys.Open() {
		return nil, nil
	}
	presented := apikey.Presented(r.Header, anthropic)
	if presented == "" {
		p.metrics.CountUnauthorized(metrics.KeyMissing)
		return nil, unauthorizedError("this proxy asks for an API key: send it as Authorization: Bearer KEY")
	}
	h, known := p.keys.Find(presented)
	switch {
	case !known:
		p.metrics.CountUnauthorized(metrics.KeyUnknown)
		return nil, unauthorizedError("this API key is not known here")
	case h.Expired():
		p.metrics.CountUnauthorized(metrics.KeyExpired)
		return nil, unauthorizedError("this API key has expired")
	}
	return h, nil
}

func unauthorizedError(message string) *apiError {
	return &apiError{status: http.StatusUnauthorized, kind: "invalid_request_error", code: "invalid_api_key", message: message}
}

// requireKey is for what is answered here, to those who have a key where there are any.
func (p *Proxy) requireKey(answer func(http.ResponseWriter, *http.Request, *apikey.Holder)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		holder, fault := p.findKey(r, true)
		if fault != nil {
			openAI.writeError(w, fault)
			return
		}
		answer(w, r, holder)
	}
}

// authenticate sees who sends the request, before its body is read, and whether its
// place and its rate of requests allow it.
func (r *request) authenticate() *apiError {
	holder, fault := r.proxy.findKey(r.httpReq, r.endpoint.dialect() == anthropic)
	if holder == nil && fault == nil {
		return nil
	}
	if fault == nil {
		r.holder = holder
		var refusal *apikey.Refusal
		if r.lease, refusal = holder.Enter(); refusal != nil {
			fault = rateLimitError(refusal)
		}
		r.writeRateHeaders()
	}
	return fault
}

// chargePrompt takes the prompt's tokens from its key's rate.
func (r *request) chargePrompt() *apiError {
	refusal := r.lease.Charge(r.input.request.Bytes / bytesPerToken)
	if refusal == nil {
		return nil
	}
	r.writeRateHeaders()
	return rateLimitError(refusal)
}

// chargeUsage notes what an attempt cost that its engine has worked on, by the replica's
// own count where there is one.
func (a *attempt) chargeUsage() {
	if a.result.End == router.NotProcessed {
		return
	}
	a.promptTokens, a.completionTokens = a.result.PromptTokens, a.result.AnswerTokens
	if a.promptTokens == 0 {
		a.promptTokens = a.decision.PromptTokens
	}
	if a.completionTokens == 0 {
		a.completionTokens = a.estimatedTokens
	}
}

// rateLimitError is OpenAI's answer to a request beyond a rate.
func rateLimitError(r *apikey.Refusal) *apiError {
	e := &apiError{status: http.StatusTooManyRequests, kind: string(r.Reason), code: "rate_limit_exceeded"}
	e.retryAfter = max(int(math.Ceil(r.Wait.Seconds())), 1)
	if r.Reason == apikey.ForConcurrency {
		e.message = fmt.Sprintf("Rate limit reached: this API key may have %d requests at once. Try again when one has ended.", r.Most)
	} else {
		e.message = fmt.Sprintf("Rate limit reached: this API key may use %d %s a minute. Try again in %ds.", r.Most, r.Reason, e.retryAfter)
	}
	return e
}

// writeRateHeaders writes where the key's rates stand, in OpenAI's headers.
func (r *request) writeRateHeaders() {
	requests, tokens := r.holder.Rates()
	h := r.client.Header()
	if requests.Limit > 0 {
		h["X-Ratelimit-Limit-Requests"] = []string{strconv.Itoa(requests.Limit)}
		h["X-Ratelimit-Remaining-Requests"] = []string{strconv.Itoa(requests.Remaining)}
		h["X-Ratelimit-Reset-Requests"] = []string{requests.Reset.Round(time.Millisecond).String()}
	}
	if tokens.Limit > 0 {
		h["X-Ratelimit-Limit-Tokens"] = []string{strconv.Itoa(tokens.Limit)}
		h["X-Ratelimit-Remaining-Tokens"] = []string{strconv.Itoa(tokens.Remaining)}
		h["X-Ratelimit-Reset-Tokens"] = []string{tokens.Reset.Round(time.Millisecond).String()}
	}
}

// mayShowRoute reports whether the client may know where its request went: a match
// tells what others have sent.
func (r *request) mayShowRoute() bool {
	if r.holder == nil { // where keys are configured, nobody knows yet who asks, or it is nobody who may
		return r.settings.RouteHeaders && r.proxy.keys.Open()
	}
	return r.settings.RouteHeaders && r.holder.RouteHeaders
}

// tenantHash stands for who sends the request; 0 for nobody in particular.
func (r *request) tenantHash() uint64 {
	if r.holder != nil {
		return nonzero(xxh3.HashString(r.holder.Name))
	}
	return keyFingerprint(r.httpReq.Header)
}

// blockSeed is what the blocks of the request begin from: the model as the engine
// knows it and, where tenants are kept apart, the tenant, so that nobody's prompt
// matches another's. A holder is told by the hash of a key, which others cannot
// know, since blocks whose beginning is known could be made to collide.
func (r *request) blockSeed(engine string) string {
	switch {
	case !r.settings.IsolateTenants:
		return engine
	case r.holder != nil:
		return engine + "\x00" + string(r.holder.Hashes[0][:])
	}
	return engine + "\x00" + strconv.FormatUint(r.input.request.Tenant, 16)
}

// keyUsage is what the metrics tell of the keys.
func (p *Proxy) keyUsage() []metrics.KeyUsage {
	var out []metrics.KeyUsage
	for _, u := range p.keys.Uses() {
		refused := map[string]int64{}
		for reason, n := range u.Refused {
			refused[string(reason)] = n
		}
		out = append(out, metrics.KeyUsage{
			Name: u.Name, InFlight: u.InFlight, Requests: u.Requests,
			PromptTokens: u.PromptTokens, CompletionTokens: u.CompletionTokens, Refused: refused,
		})
	}
	return out
}
