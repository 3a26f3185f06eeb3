package prompt

// parseGenerateFields reads what matters of a body of /inference/v1/generate beside its token
// ids: the sampling_params, of which the last three make vLLM compute the whole prompt, and
// what tells images and the like from each other, which in the token ids have the same
// placeholders. That becomes part of the seed, so that a prompt shares blocks only with those
// that have the same media.
func (p *Prompt) parseGenerateFields() {
	s, top := &p.scan, &p.top
	if v := top[fieldSamplingParams]; s.firstByte(v) == '{' {
		m := s.findMembers(v, "max_tokens", "n", "prompt_logprobs", "prompt_logprob_token_ids", "skip_reading_prefix_cache")
		p.MaxTokens, p.Sequences = s.parseInt(m[0]), max(1, s.parseInt(m[1]))
		p.Cacheable = p.Cacheable && !s.notNull(m[2]) && !s.notNull(m[3]) && !s.parseBool(m[4])
	}
	top[fieldMediaHashes] = s.member(top[fieldFeatures], "mm_hashes")
	if s.notNull(top[fieldMediaHashes]) || s.notNull(top[fieldContentParts]) {
		p.media = 1
	}
}
