package proxy

// note keeps for the recording what of the input it will need: the input is
// freed long before the request ends. Endpoints that generate nothing are not
// recorded.
func (x *exchange) note() {
	if x.p.record == nil || x.endpoint.format == plainFormat {
		return
	}
	q, req := x.p.record.Begin(), &x.input.request
	q.Arrived, q.Model, q.Session = x.arrived, req.Model, req.Session
	pr := &x.input.scratch.prompt
	q.Streams, q.Bytes, q.ExtraBytes = req.Streams, len(pr.Text), pr.ExtraBytes
	// Else the replica counts what is not in the text, or not all that is.
	q.Plain = pr.Cacheable && pr.Sequences <= 1 && pr.ExtraBytes == 0 && !pr.HasMedia()
	q.Blocks = append(q.Blocks, req.Blocks...)
	x.recorded = q
}

// noteResult takes what an attempt learned. The last attempt's is what counts.
func (a *attempt) noteResult() {
	if q := a.recorded; q != nil {
		q.PromptTokens, q.AnswerTokens = a.result.PromptTokens, a.result.AnswerTokens
		q.CachedTokens, q.CachedKnown = a.result.CachedTokens, a.result.CachedKnown
	}
}

// record hands the request over to be written.
func (x *exchange) record() {
	if q := x.recorded; q != nil {
		q.Code, q.TTFT, q.Duration = x.outcome.Code, x.outcome.TTFT, x.outcome.Duration
		x.p.record.Add(q)
		x.recorded = nil
	}
}
