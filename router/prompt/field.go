package prompt

// field is a top-level key that routing reads.
type field uint8

const (
	fieldNone field = iota
	fieldModel
	fieldMessages
	fieldPrompt
	fieldTools
	fieldStream
	fieldN
	fieldBestOf
	fieldPromptLogprobs
	fieldLogprobs
	fieldEcho
	fieldTruncate
	fieldPromptEmbeds
	fieldPreviousResponse
	fieldMaxTokens
	fieldMaxCompletionTokens // the newer name; max_output_tokens in responses

	// From here on, what changes a prompt as a whole. vLLM mixes cache_salt
	// into its block hashes; the others reach the chat template or the
	// processor of media. add_generation_prompt and continue_final_message are
	// not among them: they change only how a prompt ends.
	fieldCacheSalt
	fieldChatTemplate
	fieldChatTemplateKwargs
	fieldAddSpecialTokens
	fieldMediaIOKwargs
	fieldMMProcessorKwargs
	fieldDocuments
	fieldReasoningEffort
	fieldToolChoice
	numFields

	firstSeed = fieldCacheSalt
)

// fieldOf returns the field that key is in a body of this kind, or fieldNone
// when routing does not read it there.
func fieldOf(kind Kind, key []byte) field {
	switch string(key) {
	case "model":
		return fieldModel
	case "stream":
		return fieldStream
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
	default:
		switch string(key) {
		case "previous_response_id":
			return fieldPreviousResponse
		case "max_tokens":
			return fieldMaxTokens
		case "max_output_tokens":
			return fieldMaxCompletionTokens
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
	return seedOf(key)
}

func seedOf(key []byte) field {
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
