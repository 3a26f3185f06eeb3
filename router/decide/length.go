package decide

import (
	"slices"

	"warmroute/backends"
	"warmroute/prompt"
)

// The number of tokens of a prompt is an estimate. So a backend is excluded only where its replica certainly refuses the
// prompt, and another backend may take it; one that certainly takes it is preferred to one that may not. What is refused all
// the same is sent to a replica with a greater context length by the proxy.

// IsTooLong reports whether a replica will certainly refuse the request: its prompt is
// longer than the model takes there, or than the whole cache. What will be refused neither takes
// the place of others in the index nor waits for room. Half of the media's learned tokens
// count, because items differ in size; a prompt is never too long while these are not known.
func (f *Fleet) IsTooLong(req *Request, b *Backend) bool {
	return f.exceedsLength(req, b) || f.promptExceeds(req, b.Capacity)
}

// exceedsLength reports whether a replica will certainly refuse the request because of its context length.
func (f *Fleet) exceedsLength(req *Request, b *Backend) bool {
	length := req.ContextLengths.Of(b.Slot)
	return length > 0 && !req.Truncates && (length <= req.RefusedLength || f.promptExceeds(req, length))
}

// promptExceeds reports whether the prompt certainly has more than limit tokens; 0: there is no limit.
func (f *Fleet) promptExceeds(req *Request, limit int) bool {
	bytes := len(req.Blocks) * f.BlockBytes
	if limit == 0 || bytes == 0 { // a prompt that the engine truncates has no blocks
		return false
	}
	if req.Media {
		media := req.CountMedia()
		if len(req.MediaItems) == 0 || !f.Estimates.KnowsMediaTokens(req.Model, &media) {
			return false
		}
		sizes := f.Estimates.TokenSizes(req.Model, req.TextClass)
		bytes -= len(req.MediaItems) * prompt.MediaBytes
		limit -= int(sizes.CountMediaTokens(&media) / 2)
	}
	return f.Estimates.ExceedsTokens(req.Model, req.TextClass, bytes, limit)
}

// IsTooLongForAll reports whether all that serve its model will refuse the request.
func (f *Fleet) IsTooLongForAll(req *Request) bool {
	return !slices.ContainsFunc(req.Backends, func(b *backends.Backend) bool {
		v := f.Find(b)
		return v == nil || !f.IsTooLong(req, v)
	})
}

// isTooShort reports whether the context of a backend is certainly too short for the request, and that of another one,
// which may take the request now or later, is not.
func (f *Fleet) isTooShort(req *Request, b *Backend) bool {
	return req.ContextLengths.Differ() && f.exceedsLength(req, b) && slices.ContainsFunc(req.Backends, func(other *backends.Backend) bool {
		v := f.Find(other)
		return v != nil && !v.Retiring && !v.Missing.Has(req.Endpoint) && !f.isForPrefillOnly(req, v) && !f.exceedsLength(req, v)
	})
}

// FittingBackends returns the backends of a request but those whose context is too short for it.
func (f *Fleet) FittingBackends(req *Request) []*backends.Backend {
	tooShort := func(b *backends.Backend) bool {
		v := f.Find(b)
		return v != nil && f.isTooShort(req, v)
	}
	if !slices.ContainsFunc(req.Backends, tooShort) {
		return req.Backends
	}
	return slices.DeleteFunc(slices.Clone(req.Backends), tooShort)
}

// mayBeTooShort reports whether the context of a backend may be too short for the prompt and the output of a request, and
// others of its model have other lengths. Without a maximum the output counts as long as those of the backend are. A
// replica for prefill generates one token of a request that is split. After a replica has refused the request as too long,
// all that are not the longest may be too short.
func (f *Fleet) mayBeTooShort(q *Query, b *Backend) bool {
	length := q.ContextLengths.Of(b.Slot)
	switch {
	case length == 0 || !q.ContextLengths.Differ() || q.Truncates:
		return false
	case q.RefusedLength > 0:
		return slices.ContainsFunc(q.Backends, func(other *backends.Backend) bool {
			longest := q.ContextLengths.Of(other.Slot)
			return longest == 0 || longest > length
		})
	case q.NoEngine || q.NonGenerative: // several inputs may be in one body
		return false
	}
	output := float64(q.MaxOutputTokens)
	switch {
	case q.Splittable && b.Role == backends.RolePrefill:
		output = 1
	case output == 0:
		output = f.Estimates.OutputTokens(b.Slot)
	}
	tokens := q.promptTokens()
	if q.Sequences > 1 { // Bytes are those of all prompts
		tokens = min(tokens, q.countTokens((len(q.Blocks)+1)*f.BlockBytes))
	}
	media := q.CountMedia()
	margin := f.Estimates.TokensMargin(q.Model, q.TextClass, q.Media && !f.Estimates.KnowsMediaTokens(q.Model, &media))
	known := min(q.Linked.Tokens, tokens)
	return known+margin*(tokens-known)+output > float64(length)
}
