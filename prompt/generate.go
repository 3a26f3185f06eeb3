package prompt

// finishGenerate completes the prompt of a body of /inference/v1/generate after it was
// parsed: its token ids are those of a completion's prompt, and what else matters is in
// sampling_params.
func (p *Prompt) finishGenerate() error {
	s := &p.scan
	if !s.notNull(p.top[fieldPrompt]) {
		return &Error{Param: "token_ids", Message: "token_ids is missing"}
	}
	if s.firstByte(p.top[fieldSamplingParams]) == '{' {
		if err := p.parseSamplingParams(); err != nil {
			return err
		}
	}
	if err := p.parseMediaItems(); err != nil {
		return err
	}
	if len(p.Text) > 0 {
		p.setFirstMessageHash(p.Text)
	}
	p.setSeedFromFields(p.format)
	return nil
}

// samplingNames are the members of sampling_params that routing reads. The last three make
// vLLM compute the whole prompt.
var samplingNames = []string{"max_tokens", "n", "prompt_logprobs", "prompt_logprob_token_ids", "skip_reading_prefix_cache"}

// parseSamplingParams reads the object sampling_params.
func (p *Prompt) parseSamplingParams() error {
	var values [5]value
	if _, err := p.findMembers(p.top[fieldSamplingParams].start, samplingNames, values[:]); err != nil {
		return err
	}
	s := &p.scan
	p.MaxTokens = p.parseInt(values[0])
	p.Sequences = max(1, p.parseInt(values[1]))
	p.Cacheable = p.Cacheable && !s.notNull(values[2]) && !s.notNull(values[3]) && !p.parseBool(values[4])
	return nil
}

// mediaItemNames are the members of features that tell images and the like from each
// other: in the token ids they all have the same placeholders.
var mediaItemNames = []string{"mm_hashes"}

// parseMediaItems makes the prompt's media, of features or content_parts, part of its
// seed. So a prompt shares blocks only with those that have the same media.
func (p *Prompt) parseMediaItems() error {
	s := &p.scan
	if s.firstByte(p.top[fieldFeatures]) == '{' {
		var values [1]value
		if _, err := p.findMembers(p.top[fieldFeatures].start, mediaItemNames, values[:]); err != nil {
			return err
		}
		p.top[fieldMediaHashes] = values[0]
	}
	if s.notNull(p.top[fieldMediaHashes]) || s.notNull(p.top[fieldContentParts]) {
		p.media = 1
	}
	return nil
}
