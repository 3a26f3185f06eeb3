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

// identify finds who holds the key that a request came with: nil without a fault
// when no keys are configured, and everybody may come in.
func (p *Proxy) identify(r *http.Request, anthropic bool) (*apikey.Holder, *apiError) {
	if p.keys.Open() {
		return nil, nil
	}
	presented := apikey.Presented(r.Header, anthropic)
	if presented == "" {
		p.metrics.NotLetIn(metrics.NoKey)
		return nil, unauthorized("this proxy asks for an API key: send it as Authorization: Bearer KEY")
	}
	h, known := p.keys.Find(presented)
	switch {
	case !known:
		p.metrics.NotLetIn(metrics.UnknownKey)
		return nil, unauthorized("this API key is not known here")
	case h.Expired():
		p.metrics.NotLetIn(metrics.ExpiredKey)
		return nil, unauthorized("this API key has expired")
	}
	return h, nil
}

func unauthorized(message string) *apiError {
	return &apiError{status: http.StatusUnauthorized, kind: "invalid_request_error", code: "invalid_api_key", message: message}
}

// keyed is for what is answered here, to those who have a key where there are any.
func (p *Proxy) keyed(answer func(http.ResponseWriter, *http.Request, *apikey.Holder)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		holder, fault := p.identify(r, true)
		if fault != nil {
			fault.write(w, false)
			return
		}
		answer(w, r, holder)
	}
}

// admit sees who sends the request, before its body is read, and whether its
// place and its rate of requests allow it.
func (x *exchange) admit() *apiError {
	holder, fault := x.p.identify(x.r, x.endpoint.anthropic())
	if holder == nil && fault == nil {
		return nil
	}
	if fault == nil {
		x.holder = holder
		var refusal *apikey.Refusal
		if x.visit, refusal = holder.Enter(); refusal != nil {
			fault = overRate(refusal)
		}
		x.tellRates()
	}
	return fault
}

// charge takes the prompt's tokens from its key's rate.
func (x *exchange) charge() *apiError {
	refusal := x.visit.Charge(x.input.request.Bytes / bytesPerToken)
	if refusal == nil {
		return nil
	}
	x.tellRates()
	return overRate(refusal)
}

// used notes what an attempt cost that its engine has worked on, by the replica's
// own count where there is one.
func (a *attempt) used() {
	if a.result.End == router.NotProcessed {
		return
	}
	a.tokensIn, a.tokensOut = a.result.PromptTokens, a.result.AnswerTokens
	if a.tokensIn == 0 {
		a.tokensIn = a.decision.PromptTokens
	}
	if a.tokensOut == 0 {
		a.tokensOut = a.unread
	}
}

// overRate is OpenAI's answer to a request beyond a rate.
func overRate(r *apikey.Refusal) *apiError {
	e := &apiError{status: http.StatusTooManyRequests, kind: string(r.Reason), code: "rate_limit_exceeded"}
	e.retryAfter = max(int(math.Ceil(r.Wait.Seconds())), 1)
	if r.Reason == apikey.ForConcurrency {
		e.message = fmt.Sprintf("Rate limit reached: this API key may have %d requests at once. Try again when one has ended.", r.Most)
	} else {
		e.message = fmt.Sprintf("Rate limit reached: this API key may use %d %s a minute. Try again in %ds.", r.Most, r.Reason, e.retryAfter)
	}
	return e
}

// tellRates writes where the key's rates stand, in OpenAI's headers.
func (x *exchange) tellRates() {
	requests, tokens := x.holder.Rates()
	h := x.w.Header()
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

// tellsRoute reports whether the client may know where its request went: a match
// tells what others have sent.
func (x *exchange) tellsRoute() bool {
	if x.holder == nil { // where keys are configured, nobody knows yet who asks, or it is nobody who may
		return x.settings.RouteHeaders && x.p.keys.Open()
	}
	return x.settings.RouteHeaders && x.holder.RouteHeaders
}

// tenant stands for who sends the request; 0 for nobody in particular.
func (x *exchange) tenant() uint64 {
	if x.holder != nil {
		return nonzero(xxh3.HashString(x.holder.Name))
	}
	return presenter(x.r.Header)
}

// seed is what the blocks of the request begin from: the model as the engine
// knows it and, where tenants are kept apart, the tenant, so that nobody's prompt
// matches another's. A holder is told by the hash of a key, which others cannot
// know, since blocks whose beginning is known could be made to collide.
func (x *exchange) seed(engine string) string {
	switch {
	case !x.settings.IsolateTenants:
		return engine
	case x.holder != nil:
		return engine + "\x00" + string(x.holder.Hashes[0][:])
	}
	return engine + "\x00" + strconv.FormatUint(x.input.request.Tenant, 16)
}

// keyUses is what the metrics tell of the keys.
func (p *Proxy) keyUses() []metrics.KeyUse {
	var out []metrics.KeyUse
	for _, u := range p.keys.Uses() {
		refused := map[string]int64{}
		for reason, n := range u.Refused {
			refused[string(reason)] = n
		}
		out = append(out, metrics.KeyUse{
			Name: u.Name, InFlight: u.InFlight, Requests: u.Requests,
			PromptTokens: u.PromptTokens, CompletionTokens: u.CompletionTokens, Refused: refused,
		})
	}
	return out
}
