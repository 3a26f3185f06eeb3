package router

// clearly is by how much the tokens of a prompt, as estimated from its bytes,
// must exceed a limit to be taken for too many: a text may have half as many
// bytes again to a token as the others of its model.
const clearly = 1.5

// tooLong reports whether the replica on slot will refuse req, at once and with
// a 400: its prompt is longer than the model takes, or than the whole cache. What
// is known to be refused neither takes the place of others in the index nor waits
// for room. Only a prompt's text is measured: an image's bytes say little.
func (r *Router) tooLong(req *Request, slot int) bool {
	limit := req.MaxPromptTokens
	if c := r.caches[slot].capacity; c > 0 && (limit == 0 || c < limit) {
		limit = c
	}
	// No token has less than leastBytesPerToken: most requests are through here.
	bytes := float64(len(req.Blocks) * r.blockBytes)
	if limit == 0 || req.Media || bytes <= clearly*leastBytesPerToken*float64(limit) {
		return false
	}
	return bytes > clearly*float64(limit)*r.texts.bytesPerToken(req.Model)
}

// tooLongForAll reports whether all who serve its model will refuse req.
func (r *Router) tooLongForAll(req *Request) bool {
	for _, b := range req.Backends {
		if !r.has(b) || !r.tooLong(req, b.Slot) {
			return false
		}
	}
	return true
}
