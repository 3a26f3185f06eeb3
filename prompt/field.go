package prompt

import "strconv"

// field is a top-level key that routing reads.
type field uint8

const (
	fieldNone field = iota
	fieldModel
	fieldMessages
	fieldPrompt
	fieldSamplingParams
	fieldFeatures
	fieldTools
	fieldSystem
	fieldInput
	fieldInstructions
	fieldPreviousInput
	fieldReasoning
	fieldOutputConfig
	fieldThinking
	fieldStream
	fieldN
	fieldBestOf
	fieldPromptLogprobs
	fieldLogprobs
	fieldEcho
	fieldTruncate
	fieldTruncation
	fieldPromptEmbeds
	fieldPreviousResponse
	fieldRequestID
	fieldStore
	fieldMaxTokens
	fieldMaxCompletionTokens
	fieldPromptCacheKey
	fieldSessionID
	fieldMetadata

	// Fields that change a prompt as a whole, and so its seed, of which their numbers are part.
	// vLLM mixes cache_salt into its block hashes; the others reach the chat template or the media
	// processor. add_generation_prompt and continue_final_message change only the prompt's end.
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

// maxKeyBytes is the length of the longest key of a field.
const maxKeyBytes = len("previous_input_messages")

// fieldKey is a key of a field.
type fieldKey struct {
	key   string
	field field
}

// fieldOf returns the field of a key in a body of a kind, or fieldNone if routing does
// not read it there.
func fieldOf(kind Kind, key []byte) field {
	if len(key) <= maxKeyBytes {
		for _, k := range fieldsByLength[kind][len(key)] {
			if k.key == string(key) {
				return k.field
			}
		}
	}
	return fieldNone
}

// fieldsByLength are the keys that routing reads in bodies of each kind, by their lengths. Never
// modified.
var fieldsByLength = func() (all [numKinds][maxKeyBytes + 1][]fieldKey) {
	for _, k := range []struct {
		field field
		key   string
		kinds []Kind
	}{
		{fieldModel, "model", []Kind{Chat, Completion, Messages, Responses, Generate, Other}},
		{fieldStream, "stream", []Kind{Chat, Completion, Messages, Responses, Generate, Other}},
		{fieldPromptCacheKey, "prompt_cache_key", []Kind{Chat, Completion, Messages, Responses, Generate, Other}},
		{fieldSessionID, "session_id", []Kind{Chat, Completion, Messages, Responses, Generate, Other}},
		{fieldMaxTokens, "max_tokens", []Kind{Chat, Completion, Messages, Other}},
		{fieldMaxCompletionTokens, "max_completion_tokens", []Kind{Chat}}, // the newer name
		{fieldMaxCompletionTokens, "max_output_tokens", []Kind{Responses}},
		{fieldN, "n", []Kind{Chat, Completion}},
		{fieldBestOf, "best_of", []Kind{Chat, Completion}},
		{fieldPromptLogprobs, "prompt_logprobs", []Kind{Chat, Completion}},
		{fieldTruncate, "truncate_prompt_tokens", []Kind{Chat, Completion, Other}},
		{fieldTruncation, "truncation", []Kind{Responses}},
		{fieldLogprobs, "logprobs", []Kind{Completion}},
		{fieldEcho, "echo", []Kind{Completion}},
		{fieldPromptEmbeds, "prompt_embeds", []Kind{Completion}},

		{fieldMessages, "messages", []Kind{Chat, Messages}},
		{fieldPrompt, "prompt", []Kind{Completion}},
		{fieldPrompt, "token_ids", []Kind{Generate}},
		{fieldInput, "input", []Kind{Responses}},
		{fieldTools, "tools", []Kind{Chat, Messages, Responses}},
		{fieldSystem, "system", []Kind{Messages}},
		{fieldInstructions, "instructions", []Kind{Responses}}, // the system prompt
		{fieldReasoning, "reasoning", []Kind{Responses}},       // has the effort
		{fieldOutputConfig, "output_config", []Kind{Messages}}, // has the effort
		{fieldThinking, "thinking", []Kind{Messages}},
		{fieldMetadata, "metadata", []Kind{Messages}}, // may have the session
		{fieldPreviousInput, "previous_input_messages", []Kind{Responses}},
		{fieldPreviousResponse, "previous_response_id", []Kind{Responses}},
		{fieldRequestID, "request_id", []Kind{Responses}}, // becomes the id of the response
		{fieldStore, "store", []Kind{Responses}},
		{fieldSamplingParams, "sampling_params", []Kind{Generate}},
		{fieldFeatures, "features", []Kind{Generate}}, // has the hashes of its media
		{fieldContentParts, "content_parts", []Kind{Generate}},

		{fieldCacheSalt, "cache_salt", []Kind{Chat, Completion, Messages, Responses, Generate}},
		{fieldChatTemplate, "chat_template", []Kind{Chat, Completion}},
		{fieldChatTemplateKwargs, "chat_template_kwargs", []Kind{Chat, Completion, Messages, Responses}},
		{fieldAddSpecialTokens, "add_special_tokens", []Kind{Chat, Completion}},
		{fieldMediaIOKwargs, "media_io_kwargs", []Kind{Chat, Completion, Responses}},
		{fieldMMProcessorKwargs, "mm_processor_kwargs", []Kind{Chat, Completion, Responses}},
		{fieldDocuments, "documents", []Kind{Chat, Completion}},
		{fieldReasoningEffort, "reasoning_effort", []Kind{Chat, Completion}},
		{fieldToolChoice, "tool_choice", []Kind{Chat, Completion, Messages, Responses}},
	} {
		for _, kind := range k.kinds {
			of := &all[kind][len(k.key)]
			*of = append(*of, fieldKey{k.key, k.field})
		}
	}
	return all
}()

// parseBool reads a flag as vLLM does, for which 1 and "true" are true.
func (s *scanner) parseBool(v value) bool {
	switch string(s.unquote(v)) {
	case "true", "True", "TRUE", "1", "1.0":
		return true
	}
	return false
}

// parseInt reads a number as vLLM does, for which 2.0 and "2" are 2. It returns 0 for
// what is not a positive number; the replica rejects that.
func (s *scanner) parseInt(v value) int {
	written := s.unquote(v)
	if len(written) == 0 || len(written) > 32 {
		return 0
	}
	n, err := strconv.ParseFloat(string(written), 64)
	if err != nil || !(n > 0) {
		return 0
	}
	return int(min(n, 1<<31-1))
}
