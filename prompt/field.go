package prompt

import "strconv"

// field is a top-level key that routing reads.
type field uint8

const (
	fieldNone field = iota
	fieldModel
	fieldMessages
	fieldPrompt         // of Generate: token_ids
	fieldSamplingParams // of Generate
	fieldFeatures       // of Generate: has the hashes of its media
	fieldTools
	fieldSystem       // of Messages
	fieldInput        // of Responses
	fieldInstructions // of Responses: the system prompt
	fieldPreviousInput
	fieldReasoning    // of Responses: has the effort
	fieldOutputConfig // of Messages: has the effort
	fieldThinking     // of Messages
	fieldStream
	fieldN
	fieldBestOf
	fieldPromptLogprobs
	fieldLogprobs
	fieldEcho
	fieldTruncate
	fieldPromptEmbeds
	fieldPreviousResponse
	fieldRequestID // of Responses: becomes the id of the response
	fieldStore     // of Responses
	fieldMaxTokens
	fieldMaxCompletionTokens // the newer name; max_output_tokens in responses
	fieldPromptCacheKey
	fieldSessionID
	fieldMetadata // of Messages: may have the session

	// Fields that change a prompt as a whole, and so its seed. vLLM mixes cache_salt
	// into its block hashes; the others reach the chat template or the media processor.
	// add_generation_prompt and continue_final_message change only the prompt's end.
	fieldCacheSalt
	fieldChatTemplate
	fieldChatTemplateKwargs
	fieldAddSpecialTokens
	fieldMediaIOKwargs
	fieldMMProcessorKwargs
	fieldDocuments
	fieldReasoningEffort
	fieldToolChoice
	fieldMediaHashes  // in the features of Generate
	fieldContentParts // of Generate
	numFields

	firstSeed = fieldCacheSalt
)

// fieldOf returns the field of a key in a body of a kind, or fieldNone if routing does
// not read it there.
func fieldOf(kind Kind, key []byte) field {
	switch string(key) {
	case "model":
		return fieldModel
	case "stream":
		return fieldStream
	case "prompt_cache_key":
		return fieldPromptCacheKey
	case "session_id":
		return fieldSessionID
	}
	switch kind {
	case Chat:
		switch string(key) {
		case "messages":
			return fieldMessages
		case "tools":
			return fieldTools
		case "max_completion_tokens":
			return fieldMaxCompletionTokens
		}
	case Completion:
		switch string(key) {
		case "prompt":
			return fieldPrompt
		case "prompt_embeds":
			return fieldPromptEmbeds
		case "echo":
			return fieldEcho
		case "logprobs":
			return fieldLogprobs
		}
	case Messages:
		switch string(key) {
		case "messages":
			return fieldMessages
		case "system":
			return fieldSystem
		case "tools":
			return fieldTools
		case "output_config":
			return fieldOutputConfig
		case "thinking":
			return fieldThinking
		case "metadata":
			return fieldMetadata
		case "max_tokens":
			return fieldMaxTokens
		case "cache_salt", "chat_template_kwargs", "tool_choice":
			return seedFieldOf(key)
		}
		return fieldNone
	case Responses:
		switch string(key) {
		case "input":
			return fieldInput
		case "instructions":
			return fieldInstructions
		case "tools":
			return fieldTools
		case "previous_response_id":
			return fieldPreviousResponse
		case "request_id":
			return fieldRequestID
		case "store":
			return fieldStore
		case "previous_input_messages":
			return fieldPreviousInput
		case "reasoning":
			return fieldReasoning
		case "max_output_tokens":
			return fieldMaxCompletionTokens
		case "cache_salt", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tool_choice":
			return seedFieldOf(key)
		}
		return fieldNone
	case Generate:
		switch string(key) {
		case "token_ids":
			return fieldPrompt
		case "sampling_params":
			return fieldSamplingParams
		case "features":
			return fieldFeatures
		case "content_parts":
			return fieldContentParts
		case "cache_salt":
			return fieldCacheSalt
		}
		return fieldNone
	default:
		if string(key) == "max_tokens" {
			return fieldMaxTokens
		}
		return fieldNone
	}
	switch string(key) {
	case "max_tokens":
		return fieldMaxTokens
	case "n":
		return fieldN
	case "best_of":
		return fieldBestOf
	case "prompt_logprobs":
		return fieldPromptLogprobs
	case "truncate_prompt_tokens":
		return fieldTruncate
	}
	return seedFieldOf(key)
}

func seedFieldOf(key []byte) field {
	switch string(key) {
	case "cache_salt":
		return fieldCacheSalt
	case "chat_template":
		return fieldChatTemplate
	case "chat_template_kwargs":
		return fieldChatTemplateKwargs
	case "add_special_tokens":
		return fieldAddSpecialTokens
	case "media_io_kwargs":
		return fieldMediaIOKwargs
	case "mm_processor_kwargs":
		return fieldMMProcessorKwargs
	case "documents":
		return fieldDocuments
	case "reasoning_effort":
		return fieldReasoningEffort
	case "tool_choice":
		return fieldToolChoice
	}
	return fieldNone
}

// findMembers sets values to the members called names of the object at i, which was
// validated, and returns the index after the object. Of equal keys the last counts, as
// in vLLM.
func (p *Prompt) findMembers(i int, names []string, values []value) (end int, err error) {
	i++
	for {
		key, at, ok, err := p.scan.nextMember(i)
		if !ok {
			return at, err
		}
		v, err := p.scan.parseValue(at, validated)
		if err != nil {
			return 0, err
		}
		for k, written := 0, p.unquote(key); k < len(names); k++ {
			if string(written) == names[k] {
				values[k] = v
				break
			}
		}
		i = v.end
	}
}

// unquote returns the string v without escapes, and any other value as it is written.
// The result is valid until the next call.
func (p *Prompt) unquote(v value) []byte {
	if p.scan.firstByte(v) != '"' {
		return p.scan.b[v.start:v.end]
	}
	if !v.escaped {
		return p.scan.b[v.start+1 : v.end-1]
	}
	p.scratch, _, _ = p.scan.appendString(p.scratch[:0], v.start) // v was checked
	return p.scratch
}

// stringOf returns the string v without escapes, and nothing for any other value. The result is
// valid until the next call of unquote.
func (p *Prompt) stringOf(v value) []byte {
	if p.scan.firstByte(v) != '"' {
		return nil
	}
	return p.unquote(v)
}

// parseBool reads a flag as vLLM does, for which 1 and "true" are true.
func (p *Prompt) parseBool(v value) bool {
	switch string(p.unquote(v)) {
	case "true", "True", "TRUE", "1", "1.0":
		return true
	}
	return false
}

// parseInt reads a number as vLLM does, for which 2.0 and "2" are 2. It returns 0 for
// what is not a positive number; the replica rejects that.
func (p *Prompt) parseInt(v value) int {
	written := p.unquote(v)
	if len(written) == 0 || len(written) > 32 {
		return 0
	}
	n, err := strconv.ParseFloat(string(written), 64)
	if err != nil || !(n > 0) {
		return 0
	}
	return int(min(n, 1<<31-1))
}
